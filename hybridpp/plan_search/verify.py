"""Verify a sharding spec: run the block on in-process ranks, and compare it with the reference block."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from hybridpp.cluster import Group, Loopback, current_world
from hybridpp.module_adapter import ModuleAdapter
from hybridpp.plan_search.block_run import BlockOutcome, ReferenceBlock, ResultKey, ResultsDiffer
from hybridpp.plan_search.gradient_sketch import Sketch, close, largest
from hybridpp.plan_search.trial_errors import failure_reason
from hybridpp.sharding_plan.sharding_spec import DimShard, ShardingSpec
from hybridpp.tensor_parallel.shard import shard

_Found = TypeVar("_Found")


class Rejected(NamedTuple):
    """A spec that changes results or gradients, or cannot run.

    Attributes:
        error: what a rank raised; None: the numbers differ.
        only_in_run: whether it raised in the formats of the run alone, and the numbers are right.
    """

    error: str | None = None
    only_in_run: bool = False


def common_error(rejections: Sequence[Rejected]) -> str | None:
    """The error of a candidate that would be right; else the first one's, if all raised.

    Else None: that results differ is the better reason.
    """
    right = next((rejected.error for rejected in rejections if rejected.only_in_run), None)
    if right is None and rejections and all(rejected.error for rejected in rejections):
        return rejections[0].error
    return right


def verify(reference: ReferenceBlock, spec: ShardingSpec, tp_size: int) -> ShardingSpec | Rejected:
    """Whether a spec reproduces the reference block's results and gradients.

    In training, too, where the block does something else there than in evaluation; with the arguments of other samples;
    with numbers of many sizes, which reach limits in it; and whether it runs in the formats of the run, whose kernels
    may refuse a shard. The runtime's own :func:`~hybridpp.tensor_parallel.shard` applies the spec. Collective: none
    outside of this process.

    Args:
        reference: the block with its outcome.
        spec: to verify.
        tp_size: number of ranks.

    Returns: The spec, completed by ``partial_grad``, ``results``, and arguments whose gradients are sums; or why it is
        rejected.

    Raises:
        Exception: memory ran out, or a device failed.
    """
    try:
        found = _verify(reference, spec, tp_size)
        if not isinstance(found, Rejected):
            found = in_other_ways(
                reference, found, lambda other, spec: _verified_otherwise(reference, other, spec, tp_size)
            )
        if isinstance(found, Rejected):
            return found
        accepted = found
        return refused_in_run(reference, lambda adapter, group: shard(adapter, accepted, group), tp_size) or found
    except Exception as error:  # a wrong candidate may make the block raise anything
        return _rejected(error)


def in_other_ways(
    reference: ReferenceBlock, found: _Found, tried: Callable[[ReferenceBlock, _Found], _Found | Rejected]
) -> _Found | Rejected:
    """What was verified of a block, if it holds in all other ways to run it, too.

    Args:
        reference: the block.
        found: what was verified in the first way.
        tried: verifies it in another way, and gives what holds in both.
    """
    with closing(reference.other_ways()) as ways:
        for other in ways:
            both = tried(other, found)
            if isinstance(both, Rejected):
                return both
            found = both
    return found


def _rejected(error: Exception) -> Rejected:
    return Rejected() if isinstance(error, ResultsDiffer) else Rejected(failure_reason(error))


def _verify(reference: ReferenceBlock, spec: ShardingSpec, tp_size: int) -> ShardingSpec | Rejected:
    ranks = _run(reference, spec, tp_size)
    if ranks[0].gradients:
        found = _verified(reference, spec, ranks)
        arguments = _summed_arguments(reference, ranks) if found is None else {}
        if arguments:
            more = spec | ShardingSpec(arguments=arguments | dict(spec.arguments))
            found = _verified(reference, more, _run(reference, more, tp_size))
        return found or Rejected()
    rejected = Rejected()
    for results in _partial(reference, ranks[0], tp_size):
        more = spec | ShardingSpec(results=results)
        try:
            found = _verified(reference, more, _run(reference, more, tp_size))
        except Exception as error:  # the same; another candidate may be right
            rejected = _rejected(error)
            continue
        if found is not None:
            return found
    return rejected


def _verified_otherwise(
    reference: ReferenceBlock, other: ReferenceBlock, spec: ShardingSpec, tp_size: int
) -> ShardingSpec | Rejected:
    """A spec that was verified in one way, if it holds in another, too: in training, or with other numbers."""
    ranks = _run(other, spec, tp_size)
    found = _verified(other, spec, ranks) if ranks[0].gradients else None
    if found is None:
        return Rejected()
    summed = summed_in_both(reference, other, spec.partial_grad, found.partial_grad)
    return Rejected() if summed is None else replace(spec, partial_grad=summed)


def summed_in_both(
    reference: ReferenceBlock, other: ReferenceBlock, summed: frozenset[str], summed_otherwise: frozenset[str]
) -> frozenset[str] | None:
    """The parameters whose gradients are sums over ranks, in both ways to run a block.

    None: one of them is a sum in one of them and complete in the other, and not zero there.

    Args:
        reference: the block in evaluation.
        other: the same in training, or with other numbers.
        summed: those found in evaluation.
        summed_otherwise: those found in the other way.
    """
    is_zero = all(_is_zero(other.outcome.gradients[name]) for name in summed - summed_otherwise)
    is_zero = is_zero and all(_is_zero(reference.outcome.gradients[name]) for name in summed_otherwise - summed)
    return summed | summed_otherwise if is_zero else None


def _is_zero(sketches: Sketch) -> bool:
    return not any(bool(numbers.any()) for numbers in sketches)


def _run(reference: ReferenceBlock, spec: ShardingSpec, tp_size: int) -> list[BlockOutcome]:
    def run() -> BlockOutcome:
        group = current_world().split([range(tp_size)])
        assert group is not None
        block = reference.copy()
        shard(ModuleAdapter(block), spec, group, share_memory=True)
        return reference.outcome_of(block)

    return Loopback(tp_size).run(run)


def refused_in_run(
    reference: ReferenceBlock, divide: Callable[[ModuleAdapter, Group], object], tp_size: int
) -> Rejected | None:
    """Why a verified way to shard a block cannot run in the formats of the run; None: it can.

    Kernels want sizes and strides that depend on the format: those of stacked experts multiples of 16 bytes. Nothing is
    compared, as formats round. A complete block that does not run either, on made-up numbers, says nothing.

    Args:
        reference: the block, with the formats.
        divide: gives a copy of the block this rank's shards.
        tp_size: number of ranks.
    """
    for tried in (reference, reference.in_training):
        if tried is None or tried.formats is None:
            continue

        def run(tried: ReferenceBlock = tried) -> None:
            group = current_world().split([range(tp_size)])
            assert group is not None
            adapter = ModuleAdapter(tried.copy())
            divide(adapter, group)
            tried.run_in_formats(adapter)

        try:
            Loopback(tp_size).run(run)
        except Exception as error:  # a kernel may raise anything
            reason = failure_reason(error)
            if tried.runs_in_formats():
                return Rejected(f"{reason} (in {tried.formats})", only_in_run=True)
    return None


def _summed_arguments(reference: ReferenceBlock, ranks: list[BlockOutcome]) -> dict[tuple[str, int], DimShard]:
    """Arguments that ranks read in full for their shards of activations, so that their gradients are sums over ranks.

    They are returned as shards that hold the full argument, whatever its size will be.
    """
    expected = reference.outcome.gradients
    scale = _scale(reference.outcome)
    everything = DimShard(0, (1,), (len(ranks),), repeated=True)
    found: dict[tuple[str, int], DimShard] = {}
    for index, number in enumerate(reference.call.numbers):
        if index not in expected or not reference.call.tensors[index].dim():
            continue
        gradients = [rank.gradients[index] for rank in ranks]
        is_replicated = all(_same(gradient, expected[index], scale) for gradient in gradients)
        if not is_replicated and _same(_sum(gradients), expected[index], scale):
            found["", number] = everything
    return found


def _scale(expected: BlockOutcome) -> float:
    return max((largest(numbers) for gradient in expected.gradients.values() for numbers in gradient), default=0.0)


def _partial(reference: ReferenceBlock, rank: BlockOutcome, tp_size: int) -> Iterator[dict[ResultKey, DimShard]]:
    """Ways in which results after the first may be sharded: along one dimension, or by heads of each sample."""
    results = reference.outcome.results
    unlike = {key: result.shape for key, result in results.items() if rank.results[key].shape != result.shape}
    plain: dict[ResultKey, DimShard] = {}
    for key, shape in unlike.items():
        own = rank.results[key].shape
        dims = [dim for dim in range(len(shape)) if len(own) == len(shape) and own[dim] != shape[dim]]
        if key == min(results) or len(dims) != 1 or own[dims[0]] * tp_size != shape[dims[0]]:
            return
        plain[key] = DimShard(dims[0], (shape[dims[0]],))
    yield plain
    samples = reference.call.tensors[0].shape[0] if reference.call.tensors and reference.call.tensors[0].dim() else 1
    if any(part.dim == 0 and part.widths[0] % samples == 0 for part in plain.values()):
        yield {
            key: DimShard(0, (part.widths[0] // samples,), repeated=True) if part.dim == 0 else part
            for key, part in plain.items()
        }


def _same_attributes(rank: BlockOutcome, expected: BlockOutcome) -> bool:
    """Whether the tensors left on modules equal the reference's; those of another shape are sharded state."""
    return all(
        key in rank.left and (rank.left[key].shape != x.shape or close(rank.left[key], x))
        for key, x in expected.left.items()
    )


def _verified(reference: ReferenceBlock, spec: ShardingSpec, ranks: list[BlockOutcome]) -> ShardingSpec | None:
    expected = reference.outcome
    if not all(close(rank.results[key], result) for rank in ranks for key, result in expected.results.items()):
        return None
    if not all(_same_attributes(rank, expected) for rank in ranks):
        return None
    summed = partial_gradients(expected, ranks, spec.params)
    return None if summed is None else replace(spec, partial_grad=summed)


def partial_gradients(
    expected: BlockOutcome, ranks: list[BlockOutcome], params: Mapping[str, DimShard]
) -> frozenset[str] | None:
    """The replicated parameters whose gradients are sums over ranks; None if any gradient differs from the reference's.

    Args:
        expected: of the reference block.
        ranks: of each rank's shard of it.
        params: how parameters are divided, by name.
    """
    scale = _scale(expected)
    summed = set()
    for name, full in expected.gradients.items():
        gradients = [rank.gradients[name] for rank in ranks]
        if isinstance(name, str) and name in params:
            dim = params[name].dim
            local = [gradient[dim] for gradient in gradients]
            if not close(_unsharded(local, params[name], full[dim]), full[dim], scale):
                return None
        elif not all(_same(gradient, full, scale) for gradient in gradients):
            if not isinstance(name, str) or not _same(_sum(gradients), full, scale):
                return None
            summed.add(name)
        elif isinstance(name, str) and not _all_same(gradients) and _same(_sum(gradients), full, scale):
            # Gradients so small that both pass (biases of keys, which a softmax cancels): replicated computations would
            # give the same on all ranks.
            summed.add(name)
    return frozenset(summed)


def _all_same(sketches: list[Sketch]) -> bool:
    return all(_same(sketch, sketches[0], 0.0) for sketch in sketches[1:])


def _same(found: Sketch, expected: Sketch, scale: float) -> bool:
    return all(close(x, y, scale) for x, y in zip(found, expected, strict=True))


def _sum(sketches: list[Sketch]) -> Sketch:
    return tuple(torch.stack(numbers).sum(0) for numbers in zip(*sketches, strict=True))


def _unsharded(shards: list[Tensor], part: DimShard, like: Tensor) -> Tensor:
    full = torch.zeros_like(like)
    for rank, shard_of_rank in enumerate(shards):
        full.index_add_(0, part.index(rank, len(shards), len(like)).to(full.device), shard_of_rank)
    return full
