"""Checks on the sizes of a schedule."""

from hybridpp.errors import ScheduleError


def check_counts(**counts: int) -> None:
    """Check that counts (of ranks, micro-batches, chunks) are at least 1.

    Raises:
        ScheduleError: a count is below 1.
    """
    if min(counts.values()) < 1:
        given = ", ".join(f"{name}={count}" for name, count in counts.items())
        raise ScheduleError(f"a schedule needs every count to be at least 1: got {given}.")
