"""A run of larger micro-batches, from two runs of few samples.

Sizes grow along the line through the two, as everything of a sample does in most models. A run of one sample lacks some
copies, since a dimension of 1 is contiguous as it is: they are found, and grow with the samples. Where a model does
more the more samples there are (a loop over images), two runs are not alike: then what follows of each, times and
memory, is continued by a line.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

from hybridpp.estimate.model_run import ALIVE, ModelRun, Numbers
from hybridpp.estimate.stage_memory import Held, StageMemory
from hybridpp.estimate.unit_times import UnitTimes

BASES = (1, 2)
"""Samples of the two runs."""
LARGER_BASES = (2, 4)
"""Samples of two runs that are alike where those of one and two are not."""
_GROWING = ("flops", "num_bytes", "joined_bytes")
# Copies that a run of one sample may lack, and how far before the first difference one is looked for.
_MOST_COPIES, _LOOKED_AT = 8, 64


def scaled_run(few: ModelRun, more: ModelRun, size: int, bases: tuple[int, int] = BASES) -> ModelRun | None:
    """The run of micro-batches of ``size`` samples; None: the two runs are not alike.

    Args:
        few, more: of ``bases`` samples.
        size: samples.
        bases: of the two runs.
    """
    common = _common(few, more)
    if common is None:
        return None

    def grown(low: Numbers, high: Numbers, is_common: NDArray[numpy.bool_]) -> Numbers:
        found = high * size // bases[1]
        found[is_common] = _line(low, high[is_common], size, bases)
        return found

    rows = more.ops.rows.copy()
    for name in _GROWING:
        rows[name] = grown(few.ops.rows[name], more.ops.rows[name], common.ops)
    sizes = grown(few.sizes, more.sizes, common.allocations)
    return replace(more, memory=replace(more.memory, sizes=sizes), ops=replace(more.ops, rows=rows))


class _Common(NamedTuple):
    """Which allocations and operators of the larger run the smaller one has, too."""

    allocations: NDArray[numpy.bool_]
    ops: NDArray[numpy.bool_]


def _common(few: ModelRun, more: ModelRun) -> _Common | None:
    """What two runs have in common: all of the smaller one; None: that has something else."""
    num_copies = len(more.memory) - len(few.memory)
    if not 0 <= num_copies <= _MOST_COPIES or [call.name for call in few.calls] != [call.name for call in more.calls]:
        return None
    copies: list[int] = []
    shift = _Shift(more, copies)
    while (first := _first_difference(few, shift)) is not None:
        if len(copies) == num_copies:
            return None
        # Without one of those that are made at the difference, or shortly before, the next difference is a later one.
        tried, best = [*copies, -1], first
        latest = int(numpy.searchsorted(shift.born, first, side="right"))
        for candidate in shift.kept[max(0, latest - _LOOKED_AT) : latest][::-1]:
            tried[-1] = int(candidate)
            end = _first_difference(few, _Shift(more, tried))
            if end is None or end > best:
                copies, best = list(tried), ALIVE if end is None else end
            if end is None:
                break
        if len(copies) < len(tried):
            return None
        shift = _Shift(more, copies)
    # The operator that makes a copy is the first one at its event.
    is_common = numpy.ones(len(more.ops), dtype=bool)
    is_common[numpy.searchsorted(more.ops.rows["event"], more.born[copies])] = False
    if len(copies) != num_copies or is_common.sum() != len(few.ops):
        return None
    kept = more.ops.rows[is_common]
    kinds = numpy.array([few.ops.kinds.index(one) if one in few.ops.kinds else -1 for one in more.ops.kinds])
    is_alike = numpy.array_equal(few.ops.rows["kind"], kinds[kept["kind"]])
    is_alike &= numpy.array_equal(few.ops.rows["event"], shift.moved(kept["event"]))
    allocations = numpy.ones(len(more.memory), dtype=bool)
    allocations[copies] = False
    return _Common(allocations, is_common) if is_alike else None


class _Shift:
    """A run without some of its allocations: its events are counted without theirs.

    Args:
        run: with them.
        copies: their numbers.

    Attributes:
        kept: the numbers of the others.
        born, died: of these.
    """

    def __init__(self, run: ModelRun, copies: Sequence[int]):
        died = run.died[list(copies)]
        self._events = numpy.sort(numpy.concatenate([run.born[list(copies)], died[died != ALIVE]]))
        is_kept = numpy.ones(len(run.memory), dtype=bool)
        is_kept[list(copies)] = False
        self.kept = numpy.flatnonzero(is_kept)
        self.born, self.died = self.moved(run.born[is_kept]), self.moved(run.died[is_kept])

    def moved(self, events: Numbers) -> Numbers:
        """Events of the run, counted without those of the copies."""
        fewer: Numbers = numpy.searchsorted(self._events, events, side="right")
        return numpy.where(events == ALIVE, ALIVE, events - fewer)


def _stream(born: Numbers, died: Numbers) -> Numbers:
    """What each event is: the number of an allocation, from 1; below 0, that it is freed."""
    is_freed = died != ALIVE
    numbers = numpy.arange(1, len(born) + 1)
    stream = numpy.zeros(1 + max(born.max(initial=0), died[is_freed].max(initial=0)), dtype=numpy.int64)
    stream[born], stream[died[is_freed]] = numbers, -numbers[is_freed]
    return stream


def _first_difference(few: ModelRun, other: _Shift) -> int | None:
    """The first event that is another one than in the smaller run; None: they are alike."""
    streams = _stream(few.born, few.died), _stream(other.born, other.died)
    count = min(map(len, streams))
    is_other = streams[0][:count] != streams[1][:count]
    if is_other.any():
        return int(is_other.argmax())
    return None if len(streams[0]) == len(streams[1]) else count


def scaled_times(few: UnitTimes, more: UnitTimes, size: int) -> UnitTimes:
    """The times of micro-batches of ``size`` samples, from those of :data:`LARGER_BASES`."""

    def all_of(name: str) -> tuple[Any, ...]:
        pairs = zip(getattr(few, name), getattr(more, name), strict=True)
        return tuple(None if low is None or high is None else _between(low, high, size) for low, high in pairs)

    return replace(
        few,
        begins=all_of("begins"),
        ends=all_of("ends"),
        gradients=all_of("gradients"),
        loss=_between(few.loss, more.loss, size),
        backward_end=_between(few.backward_end, more.backward_end, size),
        end=_between(few.end, more.end, size),
    )


def scaled_memories(few: Sequence[StageMemory], more: Sequence[StageMemory], size: int) -> tuple[StageMemory, ...]:
    """The memory of stages for micro-batches of ``size`` samples, from that for :data:`LARGER_BASES`."""

    def bytes_of(low: Any, high: Any) -> Any:
        if isinstance(low, Held):
            return Held(*(round(_between(*pair, size)) for pair in zip(low, high, strict=True)))
        return round(_between(low, high, size))

    names = [field.name for field in fields(StageMemory)]
    return tuple(
        StageMemory(**{name: bytes_of(getattr(low, name), getattr(high, name)) for name in names})
        for low, high in zip(few, more, strict=True)
    )


def _between(few: float, more: float, size: int) -> float:
    low, high = LARGER_BASES
    return max(0.0, few + (size - low) * (more - few) / (high - low))


def _line(few: Numbers, more: Numbers, size: int, bases: tuple[int, int]) -> Numbers:
    return numpy.maximum(0, few + (size - bases[0]) * (more - few) // (bases[1] - bases[0]))
