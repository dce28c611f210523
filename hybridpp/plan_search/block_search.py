"""Search for a way to shard one block."""

import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeAlias

from torch import nn

from hybridpp.nn.linear import linear_shapes
from hybridpp.plan_search.block_run import copy_block, randomized_copy
from hybridpp.plan_search.candidates import CandidateGenerator
from hybridpp.plan_search.dataflow import layer_dataflow
from hybridpp.plan_search.layer_groups import LayerGroup, groups_of
from hybridpp.plan_search.size_attributes import indivisible
from hybridpp.plan_search.stacked_experts import expert_modules, expert_specs
from hybridpp.plan_search.verify import Rejected, common_error, verify
from hybridpp.tensor_parallel.plan import ShardKind
from hybridpp.tensor_parallel.sharding_spec import ShardingSpec

_MAX_CANDIDATES = 160

SampleCall: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a block's forward."""


@dataclass
class BlockPlan:
    """How one block is sharded; names are inside the block.

    Attributes:
        spec: how it is sharded.
        reasons: why a layer stays replicated.
    """

    spec: ShardingSpec = field(default_factory=ShardingSpec)
    reasons: dict[str, str] = field(default_factory=dict)


class PlanSearch:
    """Searches for a way to shard one block; the block itself is not changed.

    Args:
        block: of the model.
        call: arguments of its forward.
        tp_size: number of ranks.
        own_plan: the kinds of layers that the model's own plan names, by their names in the block: tried first.
    """

    def __init__(
        self, block: nn.Module, call: SampleCall, tp_size: int, own_plan: Mapping[str, ShardKind] | None = None
    ):
        self._own_plan = own_plan or {}
        args, kwargs = call
        self._tp_size = tp_size
        self._layers = linear_shapes(block)
        self._reference = randomized_copy(block, args, kwargs)
        self._block, self._call = self._reference.block, self._reference.call
        tensors = [x.detach().requires_grad_(x.requires_grad) for x in self._call.tensors]
        self._flow = layer_dataflow(copy_block(self._block), self._layers, *self._call.arguments(tensors))
        for name in self._flow.non_tensor_outputs:
            del self._layers[name]
        self._candidates = CandidateGenerator(self._block, self._call, self._layers, self._flow, tp_size)
        # Errors of groups for which every candidate raised.
        self._errors: dict[frozenset[str], str] = {}

    def run(self) -> BlockPlan:
        """The spec that shards most weights among those that reproduce the reference block's results and gradients."""
        groups, reasons = groups_of(self._flow, self._layers)
        reasons |= dict.fromkeys(self._flow.non_tensor_outputs, "does not return one tensor")
        found: list[tuple[LayerGroup, ShardingSpec]] = []
        taken: set[str] = set()
        likeliest_first = sorted(groups, key=self._likelihood, reverse=True)
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
                spec = self._first_verified(islice(candidates_of(group), _MAX_CANDIDATES), group.layers)
                if spec is None:
                    rejected[kind] = group.layers
                    self._reject_like(group, group.layers, reasons)
                else:
                    found.append((group, spec))
                    taken |= group.layers
        for name in expert_modules(self._block):
            candidates = expert_specs(self._block, name, self._tp_size)
            spec = self._first_verified(candidates, frozenset({name}))
            if spec is None:
                reasons[name] = f"with each way to shard its tensors, the block {self._outcome(frozenset({name}))}"
            else:
                found.append((LayerGroup((name,), ()), spec))
        plan = self._combined(found)
        plan.reasons |= {name: reason for name, reason in reasons.items() if name not in taken}
        self._add_idle(plan)
        return plan

    def _kind(self, group: LayerGroup) -> Hashable:
        """Equal for groups whose layers are equal and have the same names but for numbers."""
        return tuple(
            tuple(sorted((_pattern(name), self._layers[name]) for name in names))
            for names in (group.columns, group.rows)
        )

    def _reject_like(self, group: LayerGroup, example: frozenset[str], reasons: dict[str, str]) -> None:
        """Give a group the reason for which the group ``example`` was rejected."""
        if example in self._errors:
            self._errors.setdefault(group.layers, self._errors[example])
        for name in (*group.columns, *group.rows):
            reasons.setdefault(name, self._reason(group, name))

    def _combined(self, found: list[tuple[LayerGroup, ShardingSpec]]) -> BlockPlan:
        if not found:
            return BlockPlan()
        (_, first), *others = found
        plan = BlockPlan(first)
        for group, one in others:
            both = verify(self._reference, plan.spec | one, self._tp_size)
            if isinstance(both, Rejected):
                plan.reasons |= dict.fromkeys(
                    (*group.columns, *group.rows), "can be sharded, but not together with other layers"
                )
            else:
                plan.spec = both
        return plan

    def _add_idle(self, plan: BlockPlan) -> None:
        """Treat layers that did not run (experts without tokens) like those whose names differ in a number only."""
        examples = {(_pattern(name), self._layers[name]): name for name in plan.spec.holders() if name in self._layers}
        for name in set(self._layers) - self._flow.reads.keys():
            example = examples.get((_pattern(name), self._layers[name]))
            if example is not None:
                plan.reasons.pop(name, None)
                plan.spec |= replace(plan.spec.of_block(example).inside(name), partial_grad=frozenset())

    def _likelihood(self, group: LayerGroup) -> tuple[bool, bool, int]:
        """First the groups of the model's own plan, then those whose rows read nothing else, then by size."""
        own = {name for name in group.layers if self._own_plan.get(name) is group.kind_of(name)}
        reads = {source for row in group.rows for source in self._flow.layers_read_by(row)}
        size = sum(self._layers[name].num_outputs * self._layers[name].num_inputs for name in group.layers)
        return own == group.layers, reads == set(group.columns), size

    def _reason(self, group: LayerGroup, name: str) -> str:
        number = indivisible(self._block, self._layers, group, self._tp_size)
        return number or f"sharded with {_listed(group, name)}, the block {self._outcome(group.layers)}"

    def _outcome(self, layers: frozenset[str]) -> str:
        error = self._errors.get(layers)
        return f"raises {error}" if error else "gives different results"

    def _first_verified(self, candidates: Iterable[ShardingSpec], layers: frozenset[str]) -> ShardingSpec | None:
        rejections: list[Rejected] = []
        for candidate in candidates:
            found = verify(self._reference, candidate, self._tp_size)
            if not isinstance(found, Rejected):
                return found
            rejections.append(found)
        error = common_error(rejections)
        if error is not None:
            self._errors.setdefault(layers, error)
        return None


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", f".{name}.")


def _listed(group: LayerGroup, name: str) -> str:
    others = sorted(group.layers - {name})
    return ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
