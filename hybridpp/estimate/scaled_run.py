"""A run of larger micro-batches, from those of two and of four samples."""

from hybridpp.estimate.allocations import Allocation
from hybridpp.estimate.model_run import ModelRun
from hybridpp.estimate.unit_marks import UnitMarks

BASES = (2, 4)
"""Samples of the two runs. One sample would not do: where a dimension is 1, operators leave out copies."""


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
    made: dict[int, Allocation] = {}
    for small, large in zip(few.allocations, more.allocations, strict=True):
        grown = made[id(small)] = Allocation(_line(small.size, large.size, size), small.born)
        grown.died, grown.savers = small.died, small.savers
    ops = tuple(
        small._replace(
            flops=_line(small.flops, large.flops, size),
            num_bytes=_line(small.num_bytes, large.num_bytes, size),
            joined_bytes=_line(small.joined_bytes, large.joined_bytes, size),
        )
        for small, large in zip(few.ops, more.ops, strict=True)
    )
    return ModelRun(
        calls=tuple(_with(call, made) for call in few.calls),
        allocations=tuple(made.values()),
        ops=ops,
        loss=few.loss,
        pass_end=few.pass_end,
        backward_end=few.backward_end,
        end=few.end,
        recomputed=few.recomputed,
    )


def _are_alike(few: ModelRun, more: ModelRun) -> bool:
    return (
        len(few.allocations) == len(more.allocations)
        and [(a.born, a.died) for a in few.allocations] == [(a.born, a.died) for a in more.allocations]
        and [op.event for op in few.ops] == [op.event for op in more.ops]
        and [call[:4] for call in few.calls] == [call[:4] for call in more.calls]
    )


def _line(few: int, more: int, size: int) -> int:
    low, high = BASES
    return max(0, few + (size - low) * (more - few) // (high - low))


def _with(call: UnitMarks, made: dict[int, Allocation]) -> UnitMarks:
    arguments = tuple(None if one is None else made.get(id(one)) for one in call.arguments)
    results = tuple(None if one is None else made.get(id(one)) for one in call.results)
    return call._replace(arguments=arguments, results=results)
