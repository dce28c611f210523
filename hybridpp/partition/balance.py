"""Share out blocks over stages so that the most expensive stage is as cheap as can be."""

from collections.abc import Sequence
from functools import cache

from hybridpp.errors import PartitionError


def balance(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """How many of the blocks each stage gets, in order, at least one each.

    Minimises the cost of the most expensive stage over all contiguous cuts, by dynamic programming; among equals, the
    sum of the squared costs decides, so that no stage is left needlessly light.

    Args:
        costs: of each block, in any unit.
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
    sums: list[float] = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    @cache
    def best(end: int, stages: int) -> tuple[float, float, tuple[int, ...]]:
        """Cheapest way to give the first ``end`` blocks to ``stages`` stages: (maximum, squares, counts)."""
        if stages == 1:
            return sums[end], sums[end] ** 2, (end,)
        options = []
        for start in range(stages - 1, end):
            maximum, squares, counts = best(start, stages - 1)
            last = sums[end] - sums[start]
            options.append((max(maximum, last), squares + last**2, (*counts, end - start)))
        return min(options, key=lambda option: option[:2])

    return best(len(costs), num_stages)[2]
