"""Search for the blocks of a sharded model that can run on sequence shards, verified by trials."""

from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple

from torch import nn

from hybridpp.plan_search.block_run import SampleCall
from hybridpp.plan_search.model_search import calls_of, kind_of
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
    training_calls: Mapping[str, SampleCall] | None = None,
    formats: RunFormats | None = None,
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
        training_calls: arguments in training, of the blocks that get others there.
        formats: in which the model will run, whose kernels must take the shards; None: not known.
    """
    formats_of = None if formats is None else formats.by_block(model)
    known: dict[Hashable, SequenceBlockPlan] = {}
    results: dict[str, SequenceBlockPlan] = {}
    for name in blocks:
        if name not in sample_calls:
            results[name] = SequenceBlockPlan(reason="was not called")
            continue
        inner = spec.of_block(name)
        block, calls = model.get_submodule(name), calls_of(name, sample_calls, training_calls)
        in_run = formats_of(name) if formats_of else None
        kind = (*(kind_of(block, *call) for call in calls), str(inner), in_run)
        if kind not in known:
            known[kind] = search_sequence_block(block, calls, inner, tp_size, in_run)
        results[name] = known[kind]
    _leave_out_shared(model, results)
    return SequencePlan(
        {name: result.block for name, result in results.items() if result.block is not None},
        frozenset(f"{name}.{inner}" for name, result in results.items() for inner in result.partial_grad),
        {name: result.reason for name, result in results.items() if result.block is None},
    )


def _leave_out_shared(model: nn.Module, results: dict[str, SequenceBlockPlan]) -> None:
    """Leave out blocks with partial gradients in parameters that modules with complete gradients share."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    while True:
        partial = {f"{name}.{inner}": name for name, result in results.items() for inner in result.partial_grad}
        bad = {partial[n] for same in names.values() if not same <= partial.keys() for n in same & partial.keys()}
        if not bad:
            return
        for name in bad:
            results[name] = SequenceBlockPlan(
                reason="shares parameters with modules that do not run on sequence shards"
            )
