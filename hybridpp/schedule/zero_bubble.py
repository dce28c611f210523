"""Schedules that compute weight gradients in what would be idle time."""

from collections import deque

from hybridpp.schedule.action import Action, ActionKind, Program, Programs
from hybridpp.schedule.counts import check_counts
from hybridpp.schedule.interleaved import interleaved
from hybridpp.schedule.memory import peak_activations
from hybridpp.schedule.one_f_one_b import one_f_one_b, row
from hybridpp.schedule.split_backward import fill_weight_gradients


def zb_h1(num_ranks: int, num_microbatches: int) -> Programs:
    """ZB-H1 (Qi et al. 2023, arXiv:2401.10241): 1F1B with split backwards, within the memory of 1F1B's first rank.

    With 3 ranks and 4 micro-batches::

        rank 0 | 0F0 0F1 0F2 .   .   0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        rank 1 | .   1F0 1F1 .   1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        rank 2 | .   .   2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

    A rank of ``p`` holds at most ``min(m, p)`` activations of the ``m`` micro-batches. With equal costs a rank idles
    ``1 - 3 m / (2 m + max(m, p) + p - 1)`` of the time, which for ``m >= p`` is ``(p - 1) / (3 m + p - 1)``: with many
    micro-batches a third of 1F1B's idle time.

    Raises:
        ScheduleError: a count is below 1.
    """
    return fill_weight_gradients(one_f_one_b(num_ranks, num_microbatches), [num_ranks] * num_ranks)


def zb_h2(num_ranks: int, num_microbatches: int) -> Programs:
    """ZB-H2 (Qi et al. 2023, arXiv:2401.10241): no rank idles between its first forward and its last weight gradient.

    With 3 ranks and 6 micro-batches, where an unsplit backward takes two slots::

        rank 0 | 0F0 0F1 0F2 0F3 0F4 0B0 --- 0F5 0B1 --- 0B2 --- 0B3 --- 0B4 --- 0B5 --- .   .
        rank 1 | .   1F0 1F1 1F2 1I0 1W0 1F3 1I1 1F4 1I2 1F5 1I3 1W1 1I4 1W2 1I5 1W3 1W4 1W5 .
        rank 2 | .   .   2F0 2I0 2W0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2F5 2I5 2W1 2W2 2W3 2W4 2W5

    A rank of ``p`` holds at most ``min(m, 2 p - 1)`` activations of the ``m`` micro-batches. With equal costs rank
    ``r`` computes from slot ``r`` to slot ``r + 3 m``, for ``m >= 2 p - 1`` without a pause: so a step alone idles like
    ZB-H1, and steps that follow each other without a barrier idle ``p - 1`` slots altogether.

    Each rank runs ``2 (p - r) - 1`` forwards ahead. A weight gradient follows its input gradient, except for the last
    ``2 p - 1`` micro-batches: there forwards come first, so that the gradients reach the first rank in time. The first
    rank, for which no rank waits, splits no backward.

    Raises:
        ScheduleError: a count is below 1.
    """
    check_counts(num_ranks=num_ranks, num_microbatches=num_microbatches)
    first = row(0, num_microbatches, warmup=2 * (num_ranks - 1))
    return (first, *(_h2_row(rank, num_ranks, num_microbatches) for rank in range(1, num_ranks)))


def _h2_row(rank: int, num_ranks: int, num_microbatches: int) -> Program:
    forwards = deque(Action(rank, ActionKind.FORWARD, microbatch) for microbatch in range(num_microbatches))
    warmup = min(2 * (num_ranks - rank) - 1, num_microbatches)
    program = [forwards.popleft() for _ in range(warmup)]
    deferred: deque[Action] = deque()
    for microbatch in range(num_microbatches):
        program.append(Action(rank, ActionKind.INPUT_GRADIENT, microbatch))
        deferred.append(Action(rank, ActionKind.WEIGHT_GRADIENT, microbatch))
        if microbatch < num_microbatches - (2 * num_ranks - 1):
            program.append(deferred.popleft())
        program.append(forwards.popleft() if forwards else deferred.popleft())
    return (*program, *deferred)


def interleaved_zero_bubble(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Programs:
    """Interleaved 1F1B with split backwards, within the memory of its first rank.

    With 2 ranks, 4 micro-batches and 2 chunks::

        rank 0 | 0F0 0F1 2F0 2F1 0F2 2I0 2W0 0F3 2I1 2W1 2F2 0I0 0W0 2F3 0I1 2I2 0W1 2W2 2I3 0I2 0I3 2W3 0W2 0W3 .
        rank 1 | .   1F0 1F1 3F0 3I0 3F1 3I1 1F2 1I0 3W0 1F3 1I1 3W1 3F2 3I2 1W0 3F3 3I3 1I2 1I3 1W1 3W2 3W3 1W2 1W3

    A rank of ``p`` holds at most ``min(m v, (v - 1) g + 2 p - 1)`` activations of its ``v`` chunks together, where
    ``g`` is the size of the first group of :func:`~hybridpp.schedule.interleaved`. With equal costs ``m`` micro-batches
    take ``p - 1 + max(3 m v, 2 m v + p v, 2 m + 2 p v - p)`` slots, of which a rank computes in ``3 m v``: for
    ``m >= p`` it idles ``(p - 1) / (3 m v + p - 1)`` of the time. One chunk gives ZB-H1.

    Raises:
        ScheduleError: a count is below 1.
    """
    programs = interleaved(num_ranks, num_microbatches, num_chunks)
    return fill_weight_gradients(programs, [max(peak_activations(programs))] * num_ranks)
