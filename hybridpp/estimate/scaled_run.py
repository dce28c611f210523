"""A run of larger micro-batches, from two runs of few samples.

Sizes grow along the line through the two, as everything of a sample does in most models. A run of one sample lacks some
copies, since a dimension of 1 is contiguous as it is: they are found, and grow with the samples. Where that run has
other operators, too (a bias that is added in the product), runs of two and four samples are alike. Where a model does
more the more samples there are (a loop over images), no runs are: then what follows of each, times and memory, is
continued by a line.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

from hybridpp.estimate.model_run import ModelRun, Numbers
from hybridpp.estimate.op_log import OpKind, Ops
from hybridpp.estimate.stage_memory import Held, StageMemory
from hybridpp.estimate.unit_times import UnitTimes

BASES = (1, 2)
"""Samples of the two runs."""
LARGER_BASES = (2, 4)
"""The same, where a run of one sample differs from all others."""
_GROWING = ("flops", "num_bytes", "joined_bytes")
# How many operators up to the first difference may be the one that only the larger run has.
_LOOKED_AT = 8
# So many after it show which of them it is.
_LOOKED_AHEAD = 512
# So many operators in a row that only the larger run has.
_MOST_COPIES = 3


class ScaledRuns:
    """Runs of micro-batches of any size, from two of few samples, which are compared once.

    Args:
        few, more: the two runs.
        sizes: their samples.

    Attributes:
        sizes: these.
        calls_differ: whether the two runs call other units.
        has_loop: whether they do, or differ in products or messages, so that runs of other sizes are no more alike.
    """

    def __init__(self, few: ModelRun, more: ModelRun, sizes: tuple[int, int] = BASES):
        self._few, self._more, self.sizes = few, more, sizes
        self._common = _common(few, more, sizes[1] // sizes[0])
        self.calls_differ = [call.name for call in few.calls] != [call.name for call in more.calls]
        self.has_loop = self.calls_differ or int(_are_no_copies(few.ops).sum()) != int(_are_no_copies(more.ops).sum())

    @property
    def are_alike(self) -> bool:
        """Whether others follow."""
        return self._common is not None

    def run(self, size: int) -> ModelRun | None:
        """The run of micro-batches of ``size`` samples; None: the two runs are not alike."""
        few, more, common = self._few, self._more, self._common
        if common is None:
            return None
        least, most = self.sizes

        def grown(low: Numbers, high: Numbers, is_common: NDArray[numpy.bool_]) -> Numbers:
            found = high * size // most
            # What grows by more than the samples was expanded, and is a copy now.
            grows = is_common.copy()
            grows[is_common] = high[is_common] * least <= most * low
            low, high = low[grows[is_common]], high[grows]
            on_line = low + (size - least) * (high - low) // (most - least)
            # What shrinks was read, and comes from the operator before now: it shrinks no more.
            found[grows] = numpy.maximum(on_line, numpy.minimum(low, high))
            return found

        rows = more.ops.rows.copy()
        for name in _GROWING:
            rows[name] = grown(few.ops.rows[name], more.ops.rows[name], common.ops)
        sizes = grown(few.sizes, more.sizes, common.allocations)
        return replace(more, memory=replace(more.memory, sizes=sizes), ops=replace(more.ops, rows=rows))

    def times(self, few: UnitTimes, more: UnitTimes, size: int) -> UnitTimes:
        """The times of micro-batches of ``size`` samples, on a line through those of the two runs."""

        def all_of(name: str) -> tuple[Any, ...]:
            pairs = zip(getattr(few, name), getattr(more, name), strict=True)
            return tuple(None if low is None or high is None else self._between(low, high, size) for low, high in pairs)

        return replace(
            few,
            begins=all_of("begins"),
            ends=all_of("ends"),
            gradients=all_of("gradients"),
            loss=self._between(few.loss, more.loss, size),
            backward_end=self._between(few.backward_end, more.backward_end, size),
            end=self._between(few.end, more.end, size),
        )

    def memories(self, few: Sequence[StageMemory], more: Sequence[StageMemory], size: int) -> tuple[StageMemory, ...]:
        """The memory of stages for micro-batches of ``size`` samples, on a line through that of the two runs."""

        def bytes_of(low: Any, high: Any) -> Any:
            if isinstance(low, Held):
                return Held(*(round(self._between(*pair, size)) for pair in zip(low, high, strict=True)))
            return round(self._between(low, high, size))

        names = [field.name for field in fields(StageMemory)]
        return tuple(
            StageMemory(**{name: bytes_of(getattr(low, name), getattr(high, name)) for name in names})
            for low, high in zip(few, more, strict=True)
        )

    def _between(self, few: float, more: float, size: int) -> float:
        least, most = self.sizes
        return max(0.0, few + (size - least) * (more - few) / (most - least))


class _Common(NamedTuple):
    """Which allocations and operators of the larger run the smaller one has, too."""

    allocations: NDArray[numpy.bool_]
    ops: NDArray[numpy.bool_]


def _common(few: ModelRun, more: ModelRun, factor: int) -> _Common | None:
    """What two runs have in common: all of the smaller one; None: that has something else.

    Args:
        few, more: the runs.
        factor: how many times as many samples the second one has.
    """
    if [call.name for call in few.calls] != [call.name for call in more.calls]:
        return None
    steps, larger = _steps(few, few.ops.kinds), _steps(more, few.ops.kinds)
    kept = _without_copies(steps, larger, factor)
    if kept is None:
        return None
    is_common = numpy.zeros(len(more.ops), dtype=bool)
    is_common[kept] = True
    if (_are_no_copies(more.ops) & ~is_common).any() or _runs_each_sample(steps, larger, is_common):
        return None
    # Each operator has made what was allocated since the one before.
    maker = numpy.searchsorted(more.ops.rows["event"], more.born, side="left")
    allocations = numpy.append(is_common, True)[maker]
    low, high = few.sizes, more.sizes[allocations]
    if len(low) != len(high) or (high < low).any() or (high > factor * low).any():
        return None
    return _Common(allocations, is_common)


def _are_no_copies(ops: Ops) -> NDArray[numpy.bool_]:
    found: NDArray[numpy.bool_] = (ops.rows["flops"] > 0) | ops.are_messages
    return found


def _runs_each_sample(few: Numbers, more: Numbers, is_common: NDArray[numpy.bool_]) -> bool:
    """Whether what only the larger run does is for one sample more: the same as shortly before, which does not grow."""
    grows = numpy.ones(len(more), dtype=bool)
    grows[is_common] = (few != more[is_common]).any(axis=1)
    return any(
        ((more[begin:number] == more[number]).all(axis=1) & ~grows[begin:number]).any()
        for number in numpy.flatnonzero(~is_common).tolist()
        for begin in [max(0, number - _LOOKED_AT)]
    )


def _steps(run: ModelRun, kinds: Sequence[OpKind]) -> Numbers:
    """For each operator, the number of its kind, how much was allocated since the one before, and its bytes."""
    numbers = numpy.array([kinds.index(one) if one in kinds else -1 for one in run.ops.kinds], dtype=numpy.int64)
    rows = run.ops.rows
    made = numpy.searchsorted(run.born, rows["event"], side="right")
    return numpy.stack([numbers[rows["kind"]], numpy.diff(made, prepend=0), rows["num_bytes"]], axis=-1)


def _without_copies(few: Numbers, more: Numbers, factor: int) -> Numbers | None:
    """The numbers of the larger run's operators without those that only it has; None: the others differ, too."""
    kept = numpy.arange(len(more))
    while (first := _first_difference(few, more[kept])) is not None:
        found = (_without_some(few, more, kept, first, number, factor) for number in range(1, _MOST_COPIES + 1))
        shorter = next((one for one in found if one is not None), None)
        if shorter is None:
            return None
        kept = shorter
    return kept


def _without_some(few: Numbers, more: Numbers, kept: Numbers, first: int, number: int, factor: int) -> Numbers | None:
    """The same without so many operators in a row, at the first difference or shortly before; None: that stays.

    Of operators of one kind, they are those without which the others move no more bytes than the samples say.
    """
    begin = max(0, first + 1 - _LOOKED_AT)
    part, larger = few[begin : first + _LOOKED_AHEAD], more[kept[begin : first + _LOOKED_AHEAD + number]]
    best, chosen = (first - begin, len(few)), None
    for at in range(min(first - begin, len(larger) - number), -1, -1):
        tried = numpy.delete(larger, slice(at, at + number), axis=0)
        end = _first_difference(part, tried)
        low, high = part[: first - begin + 1, -1], tried[: first - begin + 1, -1]
        fitting = int(((low <= high) & (high <= factor * low)).sum()) if len(low) == len(high) else 0
        found = (len(part) + 1 if end is None else end, fitting)
        if found > best:
            best, chosen = found, at
    if chosen is None or len(kept) - number < len(few):
        return None
    return numpy.delete(kept, slice(begin + chosen, begin + chosen + number))


def _first_difference(few: Numbers, more: Numbers) -> int | None:
    """The number of the first step in which two runs differ; None: they are alike."""
    count = min(len(few), len(more))
    is_other = (few[:count, :-1] != more[:count, :-1]).any(axis=1)
    if is_other.any():
        return int(is_other.argmax())
    return None if len(few) == len(more) else count
