"""Checks on the sizes of a schedule."""

from math import prod

from hybridpp.errors import ScheduleError
from hybridpp.sizes import MAX_PASSES


def check_counts(**counts: int) -> None:
    """Check that counts (of ranks, micro-batches, chunks) are at least 1, and not so large that planning never ends.

    Args:
        counts: those of which the number of passes is the product have names that begin with ``num_``.

    Raises:
        ScheduleError: a count is below 1, or there are more than ``MAX_PASSES`` passes.
    """
    given = ", ".join(f"{name}={count}" for name, count in counts.items())
    if min(counts.values()) < 1:
        raise ScheduleError(f"a schedule needs every count to be at least 1: got {given}.")
    sizes = {name: count for name, count in counts.items() if name.startswith("num_")}
    if prod(sizes.values()) > MAX_PASSES:
        raise ScheduleError(
            f"a schedule has at most {MAX_PASSES} forward passes, over all stages ({' * '.join(sizes)}): got {given}. "
            "Use fewer micro-batches, of more samples each; several calls of a step can add up their gradients."
        )
