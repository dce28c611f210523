"""A run of larger micro-batches, from those of two and of four samples.

Where a model does more the more samples there are (a loop over images), the two runs are not alike: then what follows
of each, times and memory, is continued by a line.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy

from hybridpp.estimate.model_run import ModelRun, Numbers
from hybridpp.estimate.stage_memory import Held, StageMemory
from hybridpp.estimate.unit_times import UnitTimes

BASES = (2, 4)
"""Samples of the two runs. One sample would not do: where a dimension is 1, operators leave out copies."""
_GROWING = ("flops", "num_bytes", "joined_bytes")


def scaled_run(few: ModelRun, more: ModelRun, size: int) -> ModelRun | None:
    """The run of micro-batches of ``size`` samples; None: the two runs are not alike.

    Sizes grow along the line through the two, as everything of a sample does in most models.

    Args:
        few: of two samples.
        more: of four samples.
        size: samples.
    """
    if not _are_alike(few, more):
        return None
    rows = few.ops.rows.copy()
    for name in _GROWING:
        rows[name] = _line(few.ops.rows[name], more.ops.rows[name], size)
    sizes = _line(few.sizes, more.sizes, size)
    return replace(few, memory=replace(few.memory, sizes=sizes), ops=replace(few.ops, rows=rows))


def scaled_times(few: UnitTimes, more: UnitTimes, size: int) -> UnitTimes:
    """The times of micro-batches of ``size`` samples, from those of two and of four."""

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
    """The memory of stages for micro-batches of ``size`` samples, from that for two and for four."""

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
    low, high = BASES
    return max(0.0, few + (size - low) * (more - few) / (high - low))


def _are_alike(few: ModelRun, more: ModelRun) -> bool:
    return (
        numpy.array_equal(few.born, more.born)
        and numpy.array_equal(few.died, more.died)
        and numpy.array_equal(few.ops.rows["event"], more.ops.rows["event"])
        and [call[:4] for call in few.calls] == [call[:4] for call in more.calls]
    )


def _line(few: Numbers, more: Numbers, size: int) -> Numbers:
    low, high = BASES
    return numpy.maximum(0, few + (size - low) * (more - few) // (high - low))
