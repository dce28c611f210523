"""Search for a way to shard one block."""

import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import islice
from operator import or_
from typing import NamedTuple

from torch import nn

from hybridpp.nn.linear import linear_shapes
from hybridpp.plan_search.block_run import ResultKey, SampleCall, copy_block, randomized_copy
from hybridpp.plan_search.candidates import CandidateGenerator
from hybridpp.plan_search.dataflow import layer_dataflow
from hybridpp.plan_search.layer_groups import LayerGroup, common_module, groups_of
from hybridpp.plan_search.narrowed_block import NarrowedBlock
from hybridpp.plan_search.run_formats import BlockFormats
from hybridpp.plan_search.size_attributes import LIKELY, indivisible
from hybridpp.plan_search.stacked_experts import expert_modules, expert_specs
from hybridpp.plan_search.trial_errors import failure_reason
from hybridpp.plan_search.verify import Rejected, common_error, verify
from hybridpp.sharding_plan.plan import ShardKind
from hybridpp.sharding_plan.sharding_spec import ShardingSpec

_MAX_CANDIDATES = 160
# Where tp_size does not divide a group's number of heads, nearly every candidate is rejected.
_MAX_INDIVISIBLE = 2 * LIKELY


@dataclass
class BlockPlan:
    """How one block is sharded; names are inside the block.

    Attributes:
        spec: how it is sharded.
        reasons: why a layer stays replicated.
    """

    spec: ShardingSpec = field(default_factory=ShardingSpec)
    reasons: dict[str, str] = field(default_factory=dict)


class _ShardedLayers(NamedTuple):
    """Layers that can be sharded together, with the spec that was verified for them."""

    layers: frozenset[str]
    spec: ShardingSpec


class PlanSearch:
    """Searches for a way to shard one block; the block itself is not changed.

    Args:
        block: of the model.
        calls: arguments of its forward; then those in training or None, and those of other samples.
        tp_size: number of ranks.
        own_plan: kinds of the layers that the model's own plan names, by their names in the block; they are tried
            first.
        formats: in which the block will run; None: not known.
        collected: results of modules inside that hooks collect: they must be complete, as those of the block.
        complete: the block that is meant, if ``block`` is a narrow copy of it: reasons name its sizes.
        among: layers and experts that are looked at; None: all.
    """

    def __init__(
        self,
        block: nn.Module,
        calls: Sequence[SampleCall | None],
        tp_size: int,
        own_plan: Mapping[str, ShardKind] | None = None,
        formats: BlockFormats | None = None,
        collected: Collection[ResultKey] = (),
        complete: nn.Module | None = None,
        among: Collection[str] | None = None,
    ):
        self._complete = block if complete is None else complete
        self._among = among
        self._own_plan = own_plan or {}
        self._tp_size = tp_size
        self._collected = collected
        self._layers, self._complete_layers = linear_shapes(block), linear_shapes(self._complete)
        self._reference = randomized_copy(block, calls, formats, collected)
        self._block, self._call = self._reference.block, self._reference.call
        tensors = [x.detach().requires_grad_(x.requires_grad) for x in self._call.tensors]
        self._flow = layer_dataflow(copy_block(self._block), self._layers, *self._call.arguments(tensors))
        for name in self._flow.non_tensor_outputs:
            del self._layers[name]
        self._candidates = CandidateGenerator(self._block, self._call, self._layers, self._flow, tp_size)
        # The union of the groups' first candidates, if it was rejected. Of one group it is the first candidate,
        # which is not tried again.
        self._rejected_union: tuple[ShardingSpec, Rejected] | None = None
        # Errors of groups for which every candidate raised.
        self._errors: dict[frozenset[str], str] = {}

    def run(self) -> BlockPlan:
        """The spec that shards most weights among those that reproduce the reference block's results and gradients."""
        groups, reasons = groups_of(self._flow, self._layers)
        if self._among is not None:
            groups = [group for group in groups if group.layers <= set(self._among)]
        reasons |= dict.fromkeys(self._flow.non_tensor_outputs, "does not return one tensor")
        likeliest_first = sorted(groups, key=self._likelihood, reverse=True)
        sharded = self._first_candidates_together(likeliest_first) or self._one_after_another(likeliest_first, reasons)
        for name in expert_modules(self._block):
            if self._among is not None and name not in self._among:
                continue
            candidates = expert_specs(self._block, name, self._tp_size)
            spec = self._first_verified(candidates, frozenset({name}))
            if spec is None:
                reasons[name] = f"with each way to shard its tensors, the block {self._outcome(frozenset({name}))}"
            else:
                sharded.append(_ShardedLayers(frozenset({name}), spec))
        plan = self._combined(sharded)
        taken = frozenset[str]().union(*(part.layers for part in sharded))
        plan.reasons |= {name: reason for name, reason in reasons.items() if name not in taken}
        self._add_idle(plan)
        return plan

    def _first_candidates_together(self, likeliest_first: Sequence[LayerGroup]) -> list[_ShardedLayers]:
        """The likeliest candidates of all groups, verified in one trial, the only one for most blocks. Empty: rejected.

        A group whose layers are in a likelier group is left out: if the trial succeeds, those layers are sharded.
        """
        spec, taken = ShardingSpec(), frozenset[str]()
        for group in likeliest_first:
            if not group.layers & taken:
                candidate = next(self._candidates.of(group), None)
                if candidate is None:
                    return []
                spec, taken = spec | candidate, taken | group.layers
        if not taken:
            return []
        verified = verify(self._reference, spec, self._tp_size)
        if isinstance(verified, Rejected):
            self._rejected_union = spec, verified
            return []
        return [_ShardedLayers(taken, verified)]

    def _one_after_another(
        self, likeliest_first: Sequence[LayerGroup], reasons: dict[str, str]
    ) -> list[_ShardedLayers]:
        """The first candidate of each group that is verified; where there is none, ``reasons`` gets the reason."""
        sharded: list[_ShardedLayers] = []
        taken: set[str] = set()
        for candidates_of in (self._candidates.of, self._candidates.with_gathered_norms):
            # A block may be a stack of equal layers: where one of them cannot be sharded, neither can the others.
            rejected: dict[Hashable, frozenset[str]] = {}
            for group in likeliest_first:
                if group.layers & taken:
                    continue
                kind = self._kind(group)
                if kind in rejected:
                    self._reject_like(group, rejected[kind], reasons)
                    continue
                limit = _MAX_INDIVISIBLE if self._indivisible(group) else _MAX_CANDIDATES
                spec = self._first_verified(islice(candidates_of(group), limit), group.layers)
                if spec is None:
                    rejected[kind] = group.layers
                    self._reject_like(group, group.layers, reasons)
                    continue
                equal = [other for other in likeliest_first if self._kind(other) == kind and not other.layers & taken]
                sharded.append(self._with_equal_groups(_ShardedLayers(group.layers, spec), equal))
                taken |= sharded[-1].layers
        return sharded

    def _with_equal_groups(self, first: _ShardedLayers, groups: Iterable[LayerGroup]) -> _ShardedLayers:
        """The layers with the equal ones of a stack, sharded in the same way; alone where that gives other results."""
        inside = common_module(first.layers)
        relative = first.spec.of_block(inside)
        if relative.inside(inside) != first.spec:
            return first
        spec, layers = first.spec, first.layers
        for group in groups:
            if not group.layers & layers:
                spec |= relative.inside(common_module(group.layers))
                layers |= group.layers
        if layers == first.layers:
            return first
        verified = verify(self._reference, spec, self._tp_size)
        return first if isinstance(verified, Rejected) else _ShardedLayers(layers, verified)

    def _kind(self, group: LayerGroup) -> Hashable:
        """Equal for groups with equal layers whose names differ only in numbers."""
        return tuple(
            tuple(sorted((_pattern(name), self._layers[name]) for name in names))
            for names in (group.columns, group.rows)
        )

    def _reject_like(self, group: LayerGroup, example: frozenset[str], reasons: dict[str, str]) -> None:
        """Reject a group for the reason for which the group ``example`` was rejected."""
        if example in self._errors:
            self._errors.setdefault(group.layers, self._errors[example])
        for name in (*group.columns, *group.rows):
            reasons.setdefault(name, self._reason(group, name))

    def _combined(self, sharded: Sequence[_ShardedLayers]) -> BlockPlan:
        """The union of all specs; where that gives other results, the first one and those that can be added to it."""
        if not sharded:
            return BlockPlan()
        plan = BlockPlan(sharded[0].spec)
        union = self._verified_union(part.spec for part in sharded) if len(sharded) > 2 else Rejected()
        if not isinstance(union, Rejected):
            return BlockPlan(union)
        for part in sharded[1:]:
            union = self._verified_union((plan.spec, part.spec))
            if isinstance(union, Rejected):
                plan.reasons |= dict.fromkeys(part.layers, "can be sharded, but not together with other layers")
            else:
                plan.spec = union
        return plan

    def _verified_union(self, specs: Iterable[ShardingSpec]) -> ShardingSpec | Rejected:
        return verify(self._reference, reduce(or_, specs), self._tp_size)

    def _add_idle(self, plan: BlockPlan) -> None:
        """Shard layers that did not run (experts without tokens) like layers whose names differ only in a number.

        Those that run in training only are tried there.
        """
        before, reasons = plan.spec, dict(plan.reasons)
        examples = {(_pattern(name), self._layers[name]): name for name in plan.spec.holders() if name in self._layers}
        for name in set(self._layers) - self._flow.reads.keys():
            example = examples.get((_pattern(name), self._layers[name]))
            if example is not None:
                plan.reasons.pop(name, None)
                plan.spec |= replace(plan.spec.of_block(example).inside(name), partial_grad=frozenset())
        if plan.spec != before and self._reference.in_training is not None:
            verified = verify(self._reference, plan.spec, self._tp_size)
            if isinstance(verified, Rejected):
                plan.spec, plan.reasons = before, reasons
            else:
                plan.spec = verified

    def _likelihood(self, group: LayerGroup) -> tuple[bool, bool, int]:
        """First the groups of the model's own plan, then those whose rows read nothing else, then by size."""
        own = {name for name in group.layers if self._own_plan.get(name) is group.kind_of(name)}
        reads = {source for row in group.rows for source in self._flow.layers_read_by(row)}
        size = sum(self._layers[name].num_outputs * self._layers[name].num_inputs for name in group.layers)
        return own == group.layers, reads == set(group.columns), size

    def _indivisible(self, group: LayerGroup) -> str | None:
        return indivisible(self._complete, self._complete_layers, group, self._tp_size)

    def _reason(self, group: LayerGroup, name: str) -> str:
        return (
            self._indivisible(group) or f"sharded with {_listed(group, name)}, the block {self._outcome(group.layers)}"
        )

    def _outcome(self, layers: frozenset[str]) -> str:
        error = self._errors.get(layers)
        if error:
            return f"raises {error}"
        return f"gives different results{', or hooks in it collect incomplete ones' if self._collected else ''}"

    def _first_verified(self, candidates: Iterable[ShardingSpec], layers: frozenset[str]) -> ShardingSpec | None:
        rejections: list[Rejected] = []
        for candidate in candidates:
            if self._rejected_union is not None and candidate == self._rejected_union[0]:
                rejections.append(self._rejected_union[1])
                continue
            verified = verify(self._reference, candidate, self._tp_size)
            if not isinstance(verified, Rejected):
                return verified
            rejections.append(verified)
        error = common_error(rejections)
        if error is not None:
            self._errors.setdefault(layers, error)
        return None


def search_block_plan(
    block: nn.Module,
    calls: Sequence[SampleCall | None],
    tp_size: int,
    own_plan: Mapping[str, ShardKind] | None = None,
    formats: BlockFormats | None = None,
    collected: Collection[ResultKey] = (),
    among: Collection[str] | None = None,
    narrow: NarrowedBlock | None = None,
) -> BlockPlan:
    """The result of :class:`PlanSearch`, whose arguments these are; by trials on a narrow copy, if there is one."""
    has_none = not linear_shapes(block) and not expert_modules(block)
    if has_none or (among is not None and not among):
        # The block need not run: its convolutions would take long in double precision.
        return BlockPlan()
    if narrow is not None:
        start = partial(PlanSearch, narrow.block, narrow.calls, tp_size, own_plan, formats, collected, block, among)
        plan = _plan_of(start)
        spec = narrow.widened(plan.spec)
        if spec is not None:
            return BlockPlan(spec, plan.reasons)
    return _plan_of(partial(PlanSearch, block, calls, tp_size, own_plan, formats, collected, among=among))


def _plan_of(start: Callable[[], PlanSearch]) -> BlockPlan:
    try:
        search = start()
    except Exception as error:  # random numbers may make the block raise anything
        return BlockPlan(reasons={"": f"cannot run alone ({failure_reason(error)})"})
    return search.run()


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", f".{name}.")


def _listed(group: LayerGroup, name: str) -> str:
    others = sorted(group.layers - {name})
    return ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
