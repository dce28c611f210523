"""Find weights that ranks have copies of, and whose copies no longer have the same bits."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from hybridpp.cluster import gather_objects, name_ranks
from hybridpp.errors import UnequalWeightsError
from hybridpp.nn.bit_hash import bit_hash, mixed
from hybridpp.tensor_parallel import sharding_of
from hybridpp_plugins.layout import Layout
from hybridpp_plugins.optimizer import HybridOptimizer
from hybridpp_plugins.trained_weights import TrainedWeights

_CALL = "at the end of a step whose weights differ between ranks"
# The integers that a float64, as which numbers are sent, holds exactly.
_NUM_BITS = 52
_MASK = (1 << _NUM_BITS) - 1

RankLists: TypeAlias = Sequence[Sequence[int]]


class _Weight(NamedTuple):
    """What this rank has of a parameter.

    Attributes:
        name: of the parameter.
        kind: in the error: what of it.
        bucket: that its gradient lies in; -1: in none, it is frozen.
        values: all of it, or a piece.
        kept_by: the index in ``_AXES`` of the ranks of other replicas that have a copy.
        is_replicated: whether the tensor-parallel ranks have copies.
    """

    name: str
    kind: str
    bucket: int
    values: Tensor
    kept_by: int
    is_replicated: bool


# What all replicas have; what one of each set of replicas has (zero_size); what all tensor-parallel ranks have.
_REPLICAS, _SETS, _TENSOR = range(3)


def as_number(hashes: Tensor) -> Tensor:
    """One of several hashes, in their order, as a number that float64 holds; it differs if one of them does."""
    one = mixed(hashes)
    return ((one ^ (one >> (64 - _NUM_BITS))) & _MASK).double()


class WeightCheck:
    """Compares the copies of weights in every ``every``-th training step, before the optimizer changes them.

    Compared are parameters, frozen ones too, and fp32 masters: between replicas, as far as these do not divide them,
    and between tensor-parallel ranks those that are not sharded. Buffers, optimizer state, tied weights of several
    stages, and the parts of sharded weights that only neighbouring tensor-parallel ranks share (key-value heads) are
    not.

    Args:
        every: number of steps.
        model: whose weights they are.
        weights: those that are trained.
        optimizer: the boosted optimizer.
        layout: the ranks.
    """

    def __init__(
        self, every: int, model: nn.Module, weights: TrainedWeights, optimizer: HybridOptimizer, layout: Layout
    ):
        self._every, self._model, self._weights = every, model, weights
        self._optimizer, self._layout = optimizer, layout

    @property
    def is_due(self) -> bool:
        """Whether the step that runs is checked; the same on all ranks."""
        return (self._optimizer.progress.num_steps + 1) % self._every == 0

    @cached_property
    def _axes(self) -> tuple[RankLists, RankLists, RankLists]:
        """The ranks that have copies, by the index in a message."""
        grid, size = self._layout.grid, self._weights.segment.out_of
        lines = grid.groups("dp")
        return lines, [line[n::size] for line in lines for n in range(size)], grid.groups("tp")

    def hashes(self, device: torch.device) -> Tensor:
        """This rank's numbers of the message: three, float64, on ``device``. The host does not wait for it."""
        weights = list(self._own())
        with torch.no_grad():
            hashed = [bit_hash(one.values).to(device, non_blocking=True) for one in weights]
            return torch.stack([self._joined(axis, weights, hashed, device) for axis in range(3)])

    def _joined(self, axis: int, weights: list[_Weight], hashed: list[Tensor], device: torch.device) -> Tensor:
        """The hash of what an axis has copies of."""
        found = [one for weight, one in zip(weights, hashed, strict=True) if _is_along(axis, weight)]
        return as_number(torch.stack(found)) if found else torch.zeros((), dtype=torch.float64, device=device)

    def _own(self) -> Iterator[_Weight]:
        """What this rank has, in the same order on all ranks with copies of it."""
        own, sharded = self._weights, self._weights.sharded
        buckets = own.layout.buckets if own.layout else ()
        bucket_of = {slot.name: index for index, bucket in enumerate(buckets) for slot in bucket.slots}
        with own.internal():
            parameters = {name: p for name, p in self._model.named_parameters() if not p.is_meta}
        pieces = sharded.own_parts() if sharded else {}
        masters = {} if own.masters.are_copies else own.masters.masters
        for name in sorted(parameters, key=lambda name: bucket_of.get(name, -1)):
            bucket, is_replicated = bucket_of.get(name, -1), sharding_of(parameters[name]) is None
            if sharded is None or not sharded.holds(name):
                yield _Weight(name, "", bucket, parameters[name], _REPLICAS, is_replicated)
            elif name in pieces:
                yield _Weight(name, "", bucket, pieces[name], _SETS, is_replicated)
            if name in masters:
                kept_by = _REPLICAS if own.flat is None else _SETS
                yield _Weight(name, "the fp32 master of ", bucket, masters[name], kept_by, is_replicated)

    def compare(self, numbers: Sequence[Sequence[float]]) -> None:
        """Compare the numbers of all ranks, by rank; negative ones say nothing. Collective: all ranks.

        Raises:
            UnequalWeightsError: copies differ; raised on all ranks.
        """
        unequal = [
            (axis, tuple(ranks))
            for axis, lists in enumerate(self._axes)
            for ranks in lists
            if len({numbers[rank][axis] for rank in ranks}) > 1 and min(numbers[rank][axis] for rank in ranks) >= 0
        ]
        if unequal:
            self._refuse(unequal)

    def _refuse(self, unequal: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        """Find the weights that differ. Collective: all ranks; one exchange of a hash of each weight."""
        here = self._layout.world.rank
        axes = [axis for axis, ranks in unequal if here in ranks]
        own = [
            [axis, one.bucket, one.kind, one.name, int(bit_hash(one.values))]
            for axis in axes
            for one in self._own()
            if _is_along(axis, one)
        ]
        rows = gather_objects(self._layout.control, _CALL, own)
        found = [
            clause
            for axis, ranks in unequal
            for clause in _differences(ranks, [[one[1:] for one in rows[rank] if one[0] == axis] for rank in ranks])
        ]
        step = self._optimizer.progress.num_steps + 1
        if not found:  # equal when they are read again: the first reading, or a sum of it, was wrong
            found = [f"hashes of {name_ranks(unequal[0][1])} differed, and do not when they are computed again"]
        raise UnequalWeightsError(_message(step, step - self._every, found))


def _is_along(axis: int, weight: _Weight) -> bool:
    return weight.is_replicated if axis == _TENSOR else weight.kept_by == axis


def _differences(ranks: Sequence[int], rows: Sequence[Sequence[Sequence[int | str]]]) -> Iterator[str]:
    """A clause for each weight whose hashes differ."""
    for copies in zip(*rows, strict=True):
        ranks_of: dict[int | str, list[int]] = {}
        for rank, (*_, value) in zip(ranks, copies, strict=True):
            ranks_of.setdefault(value, []).append(rank)
        if len(ranks_of) > 1:
            bucket, kind, name, _ = copies[0]
            where = "frozen" if bucket == -1 else f"bucket {bucket}"
            yield f"{kind}{name} ({where}) {_sides(list(ranks_of.values()))}"


def _sides(sides: list[list[int]]) -> str:
    """Who differs from whom: from the majority, if there is one."""
    *others, most = sorted(sides, key=len)
    if len(most) > sum(map(len, others)):
        return f"on {name_ranks(sorted(rank for side in others for rank in side))} is not what it is on " + name_ranks(
            most
        )
    return "differs between " + " and ".join(name_ranks(side) for side in sorted(sides))


def _message(step: int, checked: int, found: Sequence[str]) -> str:
    what = found[0] + (f" (and {len(found) - 1} more)" if found[1:] else "")
    way_out = (
        f"Resume from a checkpoint that was saved before step {checked}, where the last check was"
        if checked > 0
        else "Start again, as no step before was checked"
    )
    return (
        f"copies of a weight must have the same bits on all ranks: in training step {step}, before its update, {what}. "
        f"{way_out}. If it comes again on the same rank, suspect the memory or the device of its host; else change "
        "weights on all ranks in the same way, and on CUDA use torch.use_deterministic_algorithms(True)."
    )
