"""All forwards, then all backwards."""

from hybridpp.schedule.action import Action, ActionKind, Program, Programs
from hybridpp.schedule.counts import check_counts


def gpipe(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Programs:
    """GPipe (Huang et al. 2019, arXiv:1811.06965), with ``num_chunks`` stages per rank, placed in a loop.

    With 2 ranks, 2 micro-batches and 2 chunks, where a backward takes two slots::

        rank 0 | 0F0 0F1 2F0 2F1 .   .   .   2B0 --- 2B1 --- 0B0 --- 0B1 ---
        rank 1 | .   1F0 1F1 3F0 3F1 3B0 --- 3B1 --- 1B0 --- 1B1 --- .   .

    A rank holds the activations of all ``m`` micro-batches for each of its ``v`` chunks: ``m v``. With equal costs a
    rank of ``p`` idles ``1 - m v / (m + p - 1 + (v - 1) max(m, p))`` of the time.

    Raises:
        ScheduleError: a count is below 1.
    """
    check_counts(num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
    return tuple(_row(range(rank, num_ranks * num_chunks, num_ranks), num_microbatches) for rank in range(num_ranks))


def _row(stages: range, num_microbatches: int) -> Program:
    microbatches = range(num_microbatches)
    forward = [Action(stage, ActionKind.FORWARD, microbatch) for stage in stages for microbatch in microbatches]
    backward = [
        Action(stage, ActionKind.BACKWARD, microbatch) for stage in reversed(stages) for microbatch in microbatches
    ]
    return (*forward, *backward)
