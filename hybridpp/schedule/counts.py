"""What every schedule asks of the numbers it is made from."""

from hybridpp.errors import ScheduleError


def check_counts(**counts: int) -> None:
    """Accept counts (of ranks, micro-batches, chunks) that a schedule can be made from.

    Raises:
        ScheduleError: a count is below 1.
    """
    if min(counts.values()) < 1:
        given = ", ".join(f"{name}={count}" for name, count in counts.items())
        raise ScheduleError(f"a schedule needs every count to be at least 1: got {given}.")
