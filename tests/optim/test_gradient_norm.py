import functools
import itertools
import math

import pytest
import torch

from hybridpp.optim import norms, total_norm


def test_norms_are_those_of_each_gradient():
    gradients = [torch.tensor([3.0, 4.0]), torch.zeros(2, 3), torch.tensor(-2.0), torch.empty(0)]
    found = norms(gradients)
    assert found.tolist() == [5.0, 0.0, 2.0, 0.0]
    assert (found.dtype, found.device.type) == (torch.float64, "cpu")


def test_a_rank_without_gradients_has_no_norms():
    assert norms([]).shape == (0,)
    assert total_norm([]) == 0.0


def test_the_total_is_the_norm_of_everything_together():
    torch.manual_seed(0)
    gradients = [torch.randn(size, dtype=torch.float64) * 10**size for size in range(1, 8)]
    expected = torch.cat(gradients).norm().item()
    assert total_norm(norms(gradients).tolist()) == pytest.approx(expected, rel=1e-12)


def left_to_right(parts):
    """Not ``sum``, which corrects its rounding since Python 3.12."""
    return functools.reduce(lambda total, part: total + part * part, parts, 0.0)


def test_the_total_depends_on_no_order():
    # Left to right, these squares give different sums in different orders.
    parts = [1e8, 1.0, 1e-8, 3.0, 1e8, 0.1]
    assert len({left_to_right(order) for order in itertools.permutations(parts)}) > 1
    assert len({total_norm(order) for order in itertools.permutations(parts)}) == 1


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([1.0, math.inf], math.inf),
        ([math.nan, 1.0], math.nan),
        ([math.inf, math.nan], math.nan),
        ([1e200, 1.0], math.inf),
    ],
)
def test_what_is_not_finite_shows(parts, expected):
    assert total_norm(parts) == pytest.approx(expected, nan_ok=True)
