"""All forwards, then all backwards: the simplest schedule, and one for several stages per rank."""

from hybridpp.errors import ScheduleError
from hybridpp.schedule.action import Action, Kind, Program, Programs


def gpipe(num_ranks: int, num_microbatches: int, num_chunks: int = 1, *, forward_only: bool = False) -> Programs:
    """GPipe (Huang et al. 2019, arXiv:1811.06965), with ``num_chunks`` stages per rank, placed in a loop.

    Stage ``s`` is on rank ``s % num_ranks``. With 2 ranks, 2 micro-batches and 2 chunks::

        rank 0 | 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        rank 1 | 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1

    A rank holds the activations of all micro-batches, for each of its chunks.

    Args:
        num_ranks: ranks of the pipeline.
        num_microbatches: micro-batches per batch.
        num_chunks: stages per rank.
        forward_only: leave the backwards out, for evaluation.

    Raises:
        ScheduleError: a count is below 1.
    """
    if min(num_ranks, num_microbatches, num_chunks) < 1:
        raise ScheduleError(
            "a schedule needs at least one rank, one micro-batch and one chunk: "
            f"got num_ranks={num_ranks}, num_microbatches={num_microbatches}, num_chunks={num_chunks}."
        )

    def row(rank: int) -> Program:
        stages = range(rank, num_ranks * num_chunks, num_ranks)
        batch = range(num_microbatches)
        forward = [Action(stage, Kind.FORWARD, microbatch) for stage in stages for microbatch in batch]
        backward = [Action(stage, Kind.BACKWARD, microbatch) for stage in reversed(stages) for microbatch in batch]
        return tuple(forward if forward_only else forward + backward)

    return tuple(row(rank) for rank in range(num_ranks))
