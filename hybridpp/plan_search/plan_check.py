"""Check a plan that a user wrote: its blocks must give the results and gradients of the whole ones."""

import copy
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridpp.nn import walk
from hybridpp.nn.names import qualified
from hybridpp.nn.torch_private import HOLDERS, has_no_data, pytree
from hybridpp.plan_search.block_run import ReferenceBlock, ResultsDiffer, SampleCall, randomized_copy
from hybridpp.plan_search.model_search import calls_of, infer_plan, kind_of
from hybridpp.plan_search.narrowed_block import narrowed_block
from hybridpp.plan_search.run_formats import BlockFormats, RunFormats
from hybridpp.plan_search.trial_errors import is_machine_failure
from hybridpp.plan_search.verify import Rejected, verify
from hybridpp.sharding_plan.plan import Plan
from hybridpp.sharding_plan.sharding_spec import ShardingSpec


class PlanFault(NamedTuple):
    """A part of a plan that changes results.

    Attributes:
        block: the module in which it does; empty: the model.
        layers: names of the modules that the plan names there.
        why: what happens, as a clause.
        instead: the plan that is searched for that block; None: it was not searched.
    """

    block: str
    layers: list[str]
    why: str
    instead: Plan | None


class SampleRun(NamedTuple):
    """What a run of the model on a sample has shown.

    Attributes:
        sample: arguments of the model.
        calls: arguments of one call of each block that was called, by name.
        more_calls: other arguments that blocks get: in training or None, and of other samples.
        results: what the blocks returned then.
    """

    sample: SampleCall
    calls: Mapping[str, SampleCall]
    more_calls: Mapping[str, Sequence[SampleCall | None]]
    results: Mapping[str, Any]


class CheckedPlan(NamedTuple):
    """The result of :func:`check_plan`.

    Attributes:
        spec: completed by what follows from the numbers: parameters whose gradients are sums over ranks, results that
            are gathered, arguments whose gradients are summed.
        faults: the parts that change results; one for blocks of a kind.
        unchecked: modules that cannot run alone, with the reason.
    """

    spec: ShardingSpec
    faults: list[PlanFault]
    unchecked: dict[str, str]


def check_plan(
    model: nn.Module,
    plan: Plan,
    blocks: Sequence[str],
    run: SampleRun,
    tp_size: int,
    formats: RunFormats | None = None,
) -> CheckedPlan:
    """Try a plan on copies of the model's blocks, with made-up weights, as a search tries candidates.

    Layers outside of blocks, and pairs of layers in several blocks, are tried in the model's own code, where the other
    blocks answer with what they returned on the sample. The model is not changed.

    Args:
        model: with full parameters.
        plan: of the user.
        blocks: names of the model's blocks.
        run: of the model on a sample.
        tp_size: number of ranks.
        formats: in which the model will run; None: not known.
    """
    spec = plan.spec
    # A layer that is a block by itself belongs to the code around it.
    holders = spec.holders()
    is_list = any(name in holders for name in blocks)
    blocks = [name for name in blocks if name not in holders]
    found = _check_blocks(model, spec, blocks, run, tp_size, formats)
    around, crossing = _around(found.spec, model, blocks), _crossing(found)
    if around == ShardingSpec() and not crossing:
        return CheckedPlan(found.spec, [*found.faults.values()], found.unchecked)
    tried = around
    for name in crossing:
        tried |= spec.of_block(name).inside(name)
    try:
        # Layers of one list pass divided activations through what is between them.
        between = [name for name in blocks if is_list and spec.of_block(name) == ShardingSpec()]
        answers = {
            name: run.results[name] for name in blocks if name in run.results and name not in (*crossing, *between)
        }
        outcome = _checked(_answering(model, answers), tried, [run.sample], tp_size, None)
    except Exception as error:  # a model may hold what cannot be copied
        if is_machine_failure(error):
            raise
        outcome = f"{type(error).__name__}: {error}"
    faults, unchecked = found.faults, found.unchecked
    if isinstance(outcome, ShardingSpec):
        faults = {name: fault for name, fault in faults.items() if name not in crossing}
        return CheckedPlan(found.spec | outcome, [*faults.values()], unchecked)
    if isinstance(outcome, PlanFault):
        return CheckedPlan(found.spec, [*faults.values()] or [outcome], unchecked)
    return CheckedPlan(found.spec, [*faults.values()], {**unchecked, "": outcome})


class _CheckedBlocks(NamedTuple):
    """The same for blocks, by their names."""

    spec: ShardingSpec
    faults: dict[str, PlanFault]
    unchecked: dict[str, str]


def _check_blocks(
    model: nn.Module,
    spec: ShardingSpec,
    blocks: Sequence[str],
    run: SampleRun,
    tp_size: int,
    formats: RunFormats | None,
) -> _CheckedBlocks:
    formats_of = None if formats is None else formats.by_block(model)
    known: dict[Hashable, ShardingSpec | PlanFault | str] = {}
    checked = _CheckedBlocks(spec, {}, {})
    for name in blocks:
        own = spec.of_block(name)
        if own == ShardingSpec():
            continue
        if name not in run.calls:
            checked.unchecked[name] = "was not called"
            continue
        block, called = walk.submodule(model, name), calls_of(name, run.calls, run.more_calls)
        in_run = formats_of(name) if formats_of else None
        kind = (*(call and kind_of(block, *call) for call in called), repr(own), in_run)
        if kind not in known:
            known[kind] = _checked(block, own, called, tp_size, in_run)
            if isinstance(fault := known[kind], PlanFault):
                instead = infer_plan(model, [name], run.calls, tp_size, run.more_calls, formats)
                known[kind] = fault._replace(instead=instead)
        found = known[kind]
        if isinstance(found, ShardingSpec):
            checked = checked._replace(spec=checked.spec | found.inside(name))
        elif isinstance(found, PlanFault):
            layers = [qualified(name, inner) for inner in found.layers]
            checked.faults[name] = found._replace(block=name, layers=layers)
        else:
            checked.unchecked[name] = found
    return checked


def _checked(
    block: nn.Module, spec: ShardingSpec, calls: Sequence[SampleCall | None], tp_size: int, formats: BlockFormats | None
) -> ShardingSpec | PlanFault | str:
    """The completed spec of a block, or what is wrong with it, or why it cannot be tried."""
    narrow = narrowed_block(block, calls, tp_size)
    inner = None if narrow is None else narrow.narrowed(spec)
    if narrow is None or inner is None:
        return _verified(block, spec, calls, tp_size, formats)
    found = _verified(narrow.block, inner, narrow.calls, tp_size, formats)
    if not isinstance(found, ShardingSpec):
        return found
    widened = narrow.widened(found)
    return _verified(block, spec, calls, tp_size, formats) if widened is None else widened


def _verified(
    block: nn.Module, spec: ShardingSpec, calls: Sequence[SampleCall | None], tp_size: int, formats: BlockFormats | None
) -> ShardingSpec | PlanFault | str:
    layers = list(dict.fromkeys((*spec.holders(), *sorted(spec.reduce_outputs | spec.copy_inputs))))
    try:
        reference = randomized_copy(block, calls, formats)
    except Exception as error:  # random numbers may make a block raise anything
        if is_machine_failure(error):
            raise
        return f"{type(error).__name__}: {error}"
    found = verify(reference, spec, tp_size)
    if isinstance(found, Rejected):
        if not _repeats(reference):
            return "it returns something else in each call"
        if found.error is None:
            return PlanFault("", layers, "gives other results than whole layers", None)
        return PlanFault("", layers, f"raises {found.error}", None)
    # What has no gradient in the trial may have one in the run.
    gradients = reference.outcome.gradients
    complete = sorted(
        name for name in spec.partial_grad - found.partial_grad if any(bool(part.any()) for part in gradients[name])
    )
    if complete:
        why = "has complete gradients of what is partial_grad on every rank, so their sum is wrong"
        return PlanFault("", complete, why, None)
    return replace(found, partial_grad=found.partial_grad | spec.partial_grad)


def _repeats(reference: ReferenceBlock) -> bool:
    """Whether a whole block gives the same results again: one that draws random numbers cannot be compared."""
    try:
        reference.outcome_of(reference.copy())
    except ResultsDiffer:
        return False
    return True


def _around(spec: ShardingSpec, model: nn.Module, blocks: Sequence[str]) -> ShardingSpec:
    """What a spec does outside of blocks, but for tables, which look complete from outside."""
    inside = tuple(f"{name}." for name in blocks)
    tables = {name for name in spec.reduce_outputs if isinstance(walk.submodule(model, name), nn.Embedding)}
    tables |= spec.gather_outputs

    def kept(name: str) -> str | None:
        return None if f"{name}.".startswith(inside) or name in tables or name.rpartition(".")[0] in tables else name

    return spec.renamed(kept)


def _crossing(found: _CheckedBlocks) -> Collection[str]:
    """Blocks with faults of which some have columns only and others rows only: pairs may be in several blocks."""
    kinds = {name: found.spec.of_block(name) for name in found.faults}
    columns = [name for name, own in kinds.items() if own.copy_inputs and not own.reduce_outputs]
    rows = [name for name, own in kinds.items() if own.reduce_outputs and not own.copy_inputs]
    return {*columns, *rows} if columns and rows else ()


def _answering(model: nn.Module, results: Mapping[str, Any]) -> nn.Module:
    """A copy of a model that shares its weights, in which blocks do not run: they answer."""
    memo: dict[int, Any] = {id(held): held for held in walk.parameters(model)}
    for name, result in results.items():
        block = walk.submodule(model, name)
        answer = memo[id(block)] = copy.copy(block)
        vars(answer).update({key: type(vars(block)[key])() for key in HOLDERS})
        vars(answer).pop("forward", None)
        answer.__class__ = type(type(block).__name__, (_Answering, type(block)), {})
        vars(answer)["_answered"] = pytree.tree_map_only(Tensor, _alone, result)
    return copy.deepcopy(model, memo)


def _alone(leaf: Tensor) -> Tensor:
    if not has_no_data(leaf):
        return leaf.detach().clone()
    return torch.randn(leaf.shape).to(leaf.dtype)


class _Answering(nn.Module):
    """A block that does not run: its results depend on every number that it is given."""

    _answered: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        means = [leaf.mean() for leaf in given if leaf.is_floating_point() and leaf.numel()]

        def answer(leaf: Tensor) -> Tensor:
            if not leaf.is_floating_point():
                return leaf.clone()
            leaf = leaf.to(means[0].dtype) if means else leaf.clone()
            for mean in means:
                leaf = leaf + mean.to(leaf.dtype)
            return leaf

        return pytree.tree_map_only(Tensor, answer, self._answered)
