"""Search for the blocks of a sharded model that can run on sequence shards, verified by trials."""

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from hybridpp.nn.names import qualified
from hybridpp.nn.torch_private import parameters_of
from hybridpp.plan_search.block_run import ResultKey, SampleCall
from hybridpp.plan_search.model_search import calls_of, kind_of, uses_of_modules
from hybridpp.plan_search.run_formats import RunFormats
from hybridpp.plan_search.sequence_block_search import SequenceBlockPlan, search_sequence_block
from hybridpp.sharding_plan.sharding_spec import ShardingSpec
from hybridpp.tensor_parallel.sequence_block import SequenceBlock


class SequencePlan(NamedTuple):
    """Which blocks run on sequence shards.

    Attributes:
        blocks: how, by name.
        partial_grad: their replicated parameters whose gradients are sums over the ranks.
        reasons: why the other blocks do not, by name.
    """

    blocks: Mapping[str, SequenceBlock] = {}
    partial_grad: frozenset[str] = frozenset()
    reasons: Mapping[str, str] = {}


def infer_sequence(
    model: nn.Module,
    blocks: Iterable[str],
    sample_calls: Mapping[str, SampleCall],
    spec: ShardingSpec,
    tp_size: int,
    more_calls: Mapping[str, Sequence[SampleCall | None]] | None = None,
    formats: RunFormats | None = None,
    collected: Mapping[str, Collection[ResultKey]] | None = None,
) -> SequencePlan:
    """Which blocks can run on sequence shards without a change of results.

    For each kind of block, one copy with random weights is sharded over in-process ranks, and its results and all
    gradients are compared with those of the complete block.

    Args:
        model: with full parameters; it is not changed, and the values of its weights do not matter.
        blocks: names of the modules to examine.
        sample_calls: arguments of one call of each block; blocks without one are left out.
        spec: how the model will be sharded.
        tp_size: number of ranks.
        more_calls: other arguments that blocks get: in training or None, and of other samples.
        formats: in which the model will run, whose kernels must take the shards; None: not known.
        collected: by block, the results of modules inside that hooks collect, and that must be complete.
    """
    formats_of = None if formats is None else formats.by_block(model)
    known: dict[Hashable, SequenceBlockPlan] = {}
    results: dict[str, SequenceBlockPlan] = {}
    for name in blocks:
        if name not in sample_calls:
            results[name] = SequenceBlockPlan(reason="was not called")
            continue
        inner = spec.of_block(name)
        block, calls = model.get_submodule(name), calls_of(name, sample_calls, more_calls)
        in_run = formats_of(name) if formats_of else None
        inside = frozenset(collected.get(name, ())) if collected else frozenset()
        kind = (*(call and kind_of(block, *call) for call in calls), str(inner), in_run, inside)
        if kind not in known:
            known[kind] = search_sequence_block(block, calls, inner, tp_size, in_run, inside)
        results[name] = known[kind]
    _leave_out_shared(model, results)
    return SequencePlan(
        {name: result.block for name, result in results.items() if result.block is not None},
        frozenset(f"{name}.{inner}" for name, result in results.items() for inner in result.partial_grad),
        {name: result.reason for name, result in results.items() if result.block is None},
    )


def _leave_out_shared(model: nn.Module, results: dict[str, SequenceBlockPlan]) -> None:
    """Leave out blocks that share a module, or a parameter, with one that uses it otherwise.

    A module may be called on sequence shards or on complete sequences; and a parameter's gradient is a sum over the
    ranks in all uses, or in none.
    """
    while True:
        modules: dict[nn.Module, dict[str, Hashable]] = {}
        gradients: dict[int, dict[str, bool]] = {}
        for name, inner, module in uses_of_modules(model, results):
            plan = results[name] if name else SequenceBlockPlan()
            modules.setdefault(module, {})[name] = plan.way(inner)
            for key, held in parameters_of(module).items():
                if held is not None:
                    uses = gradients.setdefault(id(held), {})
                    uses[name] = uses.get(name, False) or qualified(inner, key) in plan.partial_grad
        unlike = [*_unlike(modules, "modules"), *_unlike(gradients, "parameters")]
        if not unlike:
            return
        for name, what in unlike:
            results[name] = SequenceBlockPlan(
                reason=f"shares {what} with modules that do not run on sequence shards, or otherwise"
            )


def _unlike(uses: Mapping[Any, Mapping[str, Hashable]], what: str) -> Iterator[tuple[str, str]]:
    """The blocks that do something with what they share, where not all do the same."""
    for ways in uses.values():
        if len({*ways.values()}) > 1:
            yield from ((name, what) for name, way in ways.items() if way)
