import functools
import itertools
import math
import random
from fractions import Fraction

import pytest
import torch

from hybridpp.cluster import Loopback, current_world
from hybridpp.data_parallel.layout import ParameterInfo, plan_buckets
from hybridpp.optim import GlobalGradNorm, gradient_norms, total_norm
from hybridpp.optim.gradient_norm import exact_terms


def test_norms_are_those_of_each_gradient():
    gradients = [torch.tensor([3.0, 4.0]), torch.zeros(2, 3), torch.tensor(-2.0), torch.empty(0)]
    found = gradient_norms(gradients)
    assert found.tolist() == [5.0, 0.0, 2.0, 0.0]
    assert (found.dtype, found.device.type) == (torch.float64, "cpu")


def test_a_rank_without_gradients_has_no_norms():
    assert gradient_norms([]).shape == (0,)
    assert total_norm([]) == 0.0


def test_the_total_is_the_norm_of_everything_together():
    torch.manual_seed(0)
    gradients = [torch.randn(size, dtype=torch.float64) * 10**size for size in range(1, 8)]
    expected = torch.cat(gradients).norm().item()
    assert total_norm(gradient_norms(gradients).tolist()) == pytest.approx(expected, rel=1e-12)


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


def exact(gradient):
    return gradient.double().norm().item()


@pytest.mark.parametrize("size", [65_536, 65_537, 1_000_000, 3_000_000])
def test_the_norm_of_a_large_tensor_is_right_to_rounding(size):
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(0)) * 1e-3
    assert gradient_norms([gradient]).tolist() == [pytest.approx(exact(gradient), rel=1e-6)]


def test_pieces_of_3e7_elements_give_the_norm_to_rounding():
    """As replicas take it that divide a tensor among themselves."""
    size = 30_000_000
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(0))
    expected = math.sqrt(math.fsum(part.double().square().sum().item() for part in gradient.split(10**6)))
    for num_replicas in (1, 2, 3, 4):
        parameters = {"weight": ParameterInfo(size, 4 * size), "bias": ParameterInfo(7, 28)}
        layouts = [plan_buckets(parameters, 2**25, num_replicas, index) for index in range(num_replicas)]
        pieces = [layout.pieces["weight"] for layout in layouts if "weight" in layout.pieces]
        parts = gradient_norms([gradient[piece.start : piece.stop] for piece in pieces])
        assert total_norm(parts.tolist()) == pytest.approx(expected, rel=1e-6)


def test_replicas_and_tensor_parallel_ranks_share_the_norm_of_3e7_elements():
    """As with tp=2 and ZeRO 1 at dp=2: each of four ranks has its segment of its shard, and all get one number."""
    # A period that no block of the sum divides.
    period = torch.randn(30_011, generator=torch.Generator().manual_seed(0)).double() * 1e-3
    repeats = 1_000
    expected = math.sqrt(repeats * math.fsum(period.square().tolist()))
    gradient = period.float().repeat(repeats)
    shards = gradient.tensor_split(2)

    def run():
        dp, tp = divmod(current_world().rank, 2)
        shard = shards[tp]
        layout = plan_buckets({"weight": ParameterInfo(shard.numel(), shard.nbytes)}, 2**25, 2, dp)
        piece = layout.pieces["weight"]
        own = {"weight": shard[piece.start : piece.stop]}
        norm = GlobalGradNorm(current_world().control(), tuple(range(4)), 2, ("weight",), copied=(), unique={})
        return norm.total(norm.gather("in a test", own)), piece.stop - piece.start

    ranks = Loopback(4).run(run)
    assert sum(size for _, size in ranks) == gradient.numel() > 3e7
    assert {norm for norm, _ in ranks} == {ranks[0][0]}
    assert ranks[0][0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_norms_are_taken_in_at_least_fp32_for_every_dtype_and_layout(dtype):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(300, 700, generator=generator, dtype=torch.float64).to(dtype)
    gradients = [values, values.t(), values[:, :3], values[0, 0], values * 100]
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6}.get(dtype, 1e-5)
    # The last one's square is beyond fp16.
    assert gradient_norms(gradients).tolist() == [
        pytest.approx(exact(gradient), rel=tolerance) for gradient in gradients
    ]


def test_gradients_of_several_dtypes_keep_their_order():
    gradients = [torch.ones(size, dtype=dtype) for size in (4, 90_000, 9) for dtype in (torch.float32, torch.float64)]
    assert gradient_norms(gradients).tolist() == pytest.approx([2, 2, 300, 300, 3, 3], rel=1e-7)


@pytest.mark.parametrize("place", [0, 70_000, 140_000])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_one_bad_element_of_a_large_tensor_shows_in_its_norm_alone(place, bad):
    gradients = [torch.ones(4), torch.ones(140_001), torch.ones(9)]
    gradients[1][place] = bad
    assert gradient_norms(gradients).tolist() == pytest.approx([2.0, bad, 3.0], nan_ok=True)


@pytest.mark.parametrize("decades", [0, 3, 30, 300])
def test_a_few_terms_have_exactly_the_sum_of_many_values(decades):
    draw = random.Random(decades)
    values = [draw.random() * 10.0 ** draw.uniform(-decades, 1) for _ in range(500)]
    terms = exact_terms(values)
    assert sum(map(Fraction, terms)) == sum(map(Fraction, values))
    assert len(terms) <= (4 if decades <= 3 else 24)
    assert exact_terms([]) == exact_terms([0.0, 0.0]) == []


def norm_of(parts, num_ranks):
    """The norm that all ranks get if each has every ``num_ranks``-th part."""

    def run():
        rank = current_world().rank
        own = {f"p{index}": torch.tensor([part], dtype=torch.float64) for index, part in enumerate(parts)}
        own = {name: own[name] for name in list(own)[rank::num_ranks]}
        norm = GlobalGradNorm(current_world().control(), tuple(range(num_ranks)), 1, tuple(own), copied=(), unique={})
        return norm.total(norm.gather("in a test", own))

    (found,) = set(map(repr, Loopback(num_ranks).run(run)))
    return float(found)


@pytest.mark.parametrize("decades", [2, 20, 150])
def test_the_norm_depends_on_no_rank_to_the_last_bit(decades):
    draw = random.Random(decades)
    parts = [draw.random() * 10.0 ** draw.uniform(-decades, 2) for _ in range(40)]
    assert {norm_of(parts, num_ranks) for num_ranks in (1, 2, 3)} == {total_norm(parts)}


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([1.0, math.inf], math.inf),
        ([math.nan, 1.0, math.inf], math.nan),
        ([1e200, 1.0], math.inf),
        ([1e154] * 4, math.inf),
        ([], 0.0),
    ],
)
def test_every_rank_sees_what_is_not_finite_on_one(parts, expected):
    assert norm_of(parts, 2) == pytest.approx(expected, nan_ok=True)


def test_a_copy_that_is_not_finite_shows():
    def run():
        rank = current_world().rank
        norm = GlobalGradNorm(current_world().control(), (0, 1), 1, (), copied=("p",), unique={})
        return norm.total(norm.gather("in a test", {"p": torch.tensor([math.inf if rank else 1.0])}))

    assert Loopback(2).run(run) == [math.inf, math.inf]
