import itertools
import random
import re

import pytest
from covering import one_test_for

from hybridpp.errors import PartitionError
from hybridpp.partition.balance import balance


def stage_costs(costs, counts):
    ends = list(itertools.accumulate(counts))
    return [sum(costs[end - count : end]) for end, count in zip(ends, counts, strict=True)]


def every_cut(num_blocks, num_stages):
    for cuts in itertools.combinations(range(1, num_blocks), num_stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, num_blocks)))


@one_test_for("num_stages", [1, 2, 3, 5])
@one_test_for("seed", range(10))
def test_no_contiguous_cut_has_a_cheaper_maximum_or_then_smaller_squares(seed, num_stages):
    rng = random.Random(seed)
    costs = [rng.choice([0, 1, 1, 2, 5, 20]) for _ in range(rng.randint(num_stages, 8))]

    def price(counts):
        stages = stage_costs(costs, counts)
        return max(stages), sum(cost**2 for cost in stages)

    counts = balance(costs, num_stages)
    assert min(counts) >= 1
    assert price(counts) == min(price(other) for other in every_cut(len(costs), num_stages))


@pytest.mark.parametrize(
    ("costs", "num_stages", "expected"),
    [
        ([1] * 8, 4, (2, 2, 2, 2)),
        ([1] * 6, 6, (1,) * 6),
        ([3, 1, 1, 1, 3], 3, (1, 3, 1)),
        ([1, 1, 1, 10], 2, (3, 1)),
        ([0, 0, 0, 0], 2, (2, 2)),
    ],
)
def test_balanced(costs, num_stages, expected):
    counts = balance(costs, num_stages)
    assert len(counts) == num_stages
    assert stage_costs(costs, counts) == stage_costs(costs, expected)


def test_rounding_does_not_choose_between_equally_good_cuts():
    """The squares of these are beyond what a float holds exactly."""
    assert balance([3_585_150_118_155] * 39, 7) == balance([1] * 39, 7) == (5, 5, 5, 6, 6, 6, 6)


def test_many_blocks_are_quick():
    assert sum(balance(list(range(1, 129)), 16)) == 128


def test_fewer_blocks_than_stages():
    found = "a pipeline stage needs at least one block: got 2 blocks, for 3 stages (pp_size x num_model_chunks)."
    text = f"{found} Use 2 or fewer."
    with pytest.raises(PartitionError, match=f"^{re.escape(text)}$"):
        balance([1, 1], 3)
