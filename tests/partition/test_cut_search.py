"""Of the cuts within a memory limit, the cheapest is found: as by looking at every one."""

import itertools
import random

import pytest

from hybridpp.errors import PartitionError
from hybridpp.partition import MemoryBudget
from hybridpp.partition.balance import balance
from hybridpp.partition.cut_search import BudgetedCutSearch, Segments


class Random:
    """Segments with costs and names of their own and some that are shared."""

    def __init__(self, seed, num_segments):
        rng = random.Random(seed)
        self.costs = [rng.choice([1, 2, 5, 20]) for _ in range(num_segments)]
        self.sizes = {f"own{n}": rng.choice([1, 3, 10]) for n in range(num_segments)}
        self.sizes |= {f"shared{n}": rng.choice([2, 20]) for n in range(3)}
        shared = [{f"shared{n}" for n in range(3) if rng.random() < 0.3} for _ in range(num_segments)]
        self.segments = Segments.__new__(Segments)
        self.segments.names = [{f"own{n}"} | also for n, also in enumerate(shared)]

    def best(self, held):
        """By looking at every cut: (cost, squares), or the least limit."""
        fitting, least = [], []
        for points in itertools.combinations(range(1, len(self.costs)), len(held.ranks) - 1):
            counts = [b - a for a, b in itertools.pairwise((0, *points, len(self.costs)))]
            ends = list(itertools.accumulate(counts))
            costs = [sum(self.costs[end - count : end]) for end, count in zip(ends, counts, strict=True)]
            largest = max(held.by_rank(self.segments.of(counts)).values())
            least.append(largest)
            if largest <= held.limit:
                fitting.append((max(costs), sum(cost**2 for cost in costs)))
        return (min(fitting) if fitting else None), min(least)


@pytest.mark.parametrize("ranks", [(0, 1, 2), (0, 1, 1, 0), (0, 1, 0, 1), (0, 0)], ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_no_cut_within_the_limit_is_cheaper(seed, ranks):
    given = Random(seed, 8)
    for limit in (10, 25, 40, 60):
        held = MemoryBudget(sizes=given.sizes, ranks=ranks, limit=limit)
        expected, least = given.best(held)
        search = BudgetedCutSearch(given.costs, given.segments, held)
        if expected is None:
            with pytest.raises(PartitionError, match=rf"needs {least} B for parameters"):
                search.find()
        else:
            assert search._price(search.find()) == (0, *expected)


def test_of_many_cuts_of_several_stages_per_rank_one_that_fits_is_found():
    given = Random(3, 40)
    held = MemoryBudget(sizes=given.sizes, ranks=(0, 1, 2, 3, 3, 2, 1, 0), limit=93)
    search = BudgetedCutSearch(given.costs, given.segments, held)
    by_cost = balance(given.costs, 8)
    counts = search.find()
    assert sum(counts) == 40
    assert max(held.by_rank(given.segments.of(counts)).values()) <= held.limit
    assert max(held.by_rank(given.segments.of(by_cost)).values()) > held.limit
