"""One forward, one backward: the schedule that holds the fewest activations."""

from collections.abc import Sequence

from hybridpp.schedule.action import Action, ActionKind, Program, Programs
from hybridpp.schedule.counts import check_counts


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Programs:
    """1F1B (PipeDream-Flush, Narayanan et al. 2021, arXiv:2104.04473), one stage per rank.

    With 3 ranks and 4 micro-batches, where a backward takes two slots::

        rank 0 | 0F0 0F1 0F2 .   .   .   .   0B0 --- 0F3 0B1 --- .   0B2 --- .   0B3 ---
        rank 1 | .   1F0 1F1 .   .   1B0 --- 1F2 1B1 --- 1F3 1B2 --- .   1B3 --- .   .
        rank 2 | .   .   2F0 2B0 --- 2F1 2B1 --- 2F2 2B2 --- 2F3 2B3 --- .   .   .   .

    Rank ``r`` of ``p`` holds the activations of at most ``min(m, p - r)`` of the ``m`` micro-batches. With equal costs
    a rank idles ``(p - 1) / (m + p - 1)`` of the time.

    Raises:
        ScheduleError: a count is below 1.
    """
    check_counts(num_ranks=num_ranks, num_microbatches=num_microbatches)
    return tuple(row(stage, num_microbatches, warmup=num_ranks - stage - 1) for stage in range(num_ranks))


def row(stage: int, num_microbatches: int, warmup: int) -> Program:
    """The program of a rank with one stage and ``warmup`` warmup forwards."""
    forwards = [Action(stage, ActionKind.FORWARD, microbatch) for microbatch in range(num_microbatches)]
    backwards = [Action(stage, ActionKind.BACKWARD, microbatch) for microbatch in range(num_microbatches)]
    return one_by_one(forwards, backwards, warmup)


def one_by_one(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> Program:
    """``warmup`` forwards, then alternating forwards and backwards, then the remaining backwards."""
    warmup = min(warmup, len(forwards))
    paired = len(forwards) - warmup
    steady = [action for pair in zip(forwards[warmup:], backwards[:paired], strict=True) for action in pair]
    return (*forwards[:warmup], *steady, *backwards[paired:])
