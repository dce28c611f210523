"""A run of larger micro-batches, from those of two and of four samples."""

from dataclasses import replace

import numpy

from hybridpp.estimate.model_run import ModelRun, Numbers

BASES = (2, 4)
"""Samples of the two runs. One sample would not do: where a dimension is 1, operators leave out copies."""
_GROWING = ("flops", "num_bytes", "joined_bytes")


def scaled_run(few: ModelRun, more: ModelRun, size: int) -> ModelRun | None:
    """The run of micro-batches of ``size`` samples; None: the two runs are not alike, so it must be made.

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
