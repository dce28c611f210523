import pytest

from hybridpp.optim.lr_factors import Cosine, Exponential, FlatCosine, Linear, MultiStep, Polynomial, Warmup

DECAYS = [Linear(20, 4, 0.1), Polynomial(20, 4, 0.1, 2.0), Cosine(20, 4, 0.1), FlatCosine(20, 4, 0.1, 5)]
ALL = [*DECAYS, Warmup(20, 4), MultiStep(20, 4, (8, 12)), Exponential(20, 4, 0.9)]


@pytest.mark.parametrize("factor", ALL, ids=lambda factor: type(factor).__name__)
def test_the_warmup_rises_evenly_from_above_0_to_1(factor):
    assert [factor(step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


@pytest.mark.parametrize("factor", DECAYS, ids=lambda factor: type(factor).__name__)
def test_a_decay_falls_to_its_end_and_stays_there(factor):
    values = [factor(step) for step in range(4, 24)]
    assert values == sorted(values, reverse=True)
    assert values[15] > values[16] == values[-1] == 0.1


def test_flat_steps_come_before_the_decay():
    factor = FlatCosine(20, 4, 0.1, 5)
    assert [factor(step) for step in range(4, 10)] == [1.0] * 6
    assert factor(10) < 1.0


def test_milestones_count_from_the_start_of_the_schedule_in_any_order():
    factor = MultiStep(20, 0, (12, 8), 0.5)
    assert [factor(step) for step in (7, 8, 11, 12)] == [1.0, 0.5, 0.5, 0.25]
