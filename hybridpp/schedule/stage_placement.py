"""Which rank runs which stage."""

from hybridpp.errors import ScheduleError
from hybridpp.schedule.action import Programs
from hybridpp.schedule.counts import check_counts


def placement(programs: Programs) -> tuple[int, ...]:
    """The rank of each stage, read from a schedule.

    Raises:
        ScheduleError: a stage is on no rank, although a later one is.
    """
    rank_of = {action.stage: rank for rank, program in enumerate(programs) for action in program}
    missing = [stage for stage in range(max(rank_of, default=-1) + 1) if stage not in rank_of]
    if missing:
        raise ScheduleError(
            f"stage {missing[0]} is on no rank, although stage {max(rank_of)} is. Add its actions to one rank."
        )
    return tuple(rank_of[stage] for stage in range(len(rank_of)))


def looped(num_ranks: int, num_chunks: int = 1) -> tuple[int, ...]:
    """``num_chunks`` rounds over the ranks: with 2 ranks and 2 chunks, stages 0 to 3 are on ranks 0 1 0 1."""
    check_counts(num_ranks=num_ranks, num_chunks=num_chunks)
    return tuple(range(num_ranks)) * num_chunks


def v_shaped(num_ranks: int) -> tuple[int, ...]:
    """Down the ranks and up again: with 2 ranks, stages 0 to 3 are on ranks 0 1 1 0."""
    check_counts(num_ranks=num_ranks)
    return (*range(num_ranks), *reversed(range(num_ranks)))
