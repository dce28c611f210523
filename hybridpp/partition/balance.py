"""Balance blocks over stages: minimise the cost of the most expensive stage."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate

from hybridpp.errors import PartitionError

Interval = Callable[[int, int], float]
"""The cost of a stage that has the blocks from one index up to another."""


def balance(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """The number of blocks of each stage, in order, at least one each.

    Minimises the cost of the most expensive stage over all contiguous cuts, by dynamic programming; ties are decided by
    the sum of squared costs, so that the other stages are balanced, too.

    Args:
        costs: the cost of each block, in any unit.
        num_stages: number of stages.

    Raises:
        PartitionError: there are fewer blocks than stages.

    Example:
        >>> balance([1, 1, 1, 1, 2], 3)
        (2, 2, 1)
    """
    if len(costs) < num_stages:
        raise PartitionError(
            f"a pipeline stage needs at least one block: got {len(costs)} blocks, for {num_stages} "
            f"stages (pp_size x num_model_chunks). Use {len(costs)} or fewer."
        )
    counts = cheapest(len(costs), num_stages, summed(costs))
    assert counts is not None, "there are blocks for all stages"
    return counts


def summed(costs: Sequence[float]) -> Interval:
    """The cost of a stage as the sum of its blocks'."""
    sums: list[float] = [0, *accumulate(costs)]
    return lambda start, end: sums[end] - sums[start]


def cheapest(
    num_blocks: int, num_stages: int, cost: Interval, fits: Callable[[int, int], bool] | None = None
) -> tuple[int, ...] | None:
    """The counts of :func:`balance`, for any cost of a stage; None where no cut has only stages that fit.

    Args:
        num_blocks: at least as many as stages.
        num_stages: number of stages.
        cost: of a stage.
        fits: whether a stage may be; None: every one.
    """

    @cache
    def best(end: int, stages: int) -> tuple[float, float, tuple[int, ...]] | None:
        """Cheapest way to give the first ``end`` blocks to ``stages`` stages: (maximum, squares, counts)."""
        options = []
        for start in range(stages - 1, end) if stages > 1 else (0,):
            before = best(start, stages - 1) if stages > 1 else (0.0, 0, ())
            if before is None or (fits is not None and not fits(start, end)):
                continue
            maximum, squares, counts = before
            last = cost(start, end)
            options.append((max(maximum, last), squares + last**2, (*counts, end - start)))
        return min(options, key=lambda option: option[:2]) if options else None

    found = best(num_blocks, num_stages)
    return None if found is None else found[2]
