import random

import pytest

from hybridpp.schedule import SCHEDULES, make_schedule, placement
from hybridpp.simulate import Costs, PreparedPrograms, PreparedStep, simulate


def uneven(num_stages, seed):
    generator = random.Random(seed)

    def drawn(least, most):
        return tuple(generator.uniform(least, most) for _ in range(num_stages))

    return Costs(
        num_stages=num_stages,
        forward_ms=drawn(1, 2),
        input_gradient_ms=drawn(1, 2),
        weight_gradient_ms=drawn(1, 2),
        send_ms=drawn(0, 0.5)[1:] if num_stages > 1 else 0.0,
        post_ms=drawn(0, 0.1),
        reduce_ms=drawn(0, 20),
    )


def reductions(costs):
    return [costs.reducing_ms(stage) for stage in range(costs.num_stages)]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 3), (2, 4), (4, 8), (4, 12)])
def test_a_prepared_schedule_takes_what_simulating_it_says(name, num_ranks, num_microbatches):
    programs = make_schedule(name, num_ranks, num_microbatches)
    prepared = PreparedPrograms(programs)
    for seed in range(3):
        costs = uneven(len(placement(programs)), seed)
        ends, timeline = prepared.ends(costs), simulate(programs, costs).timeline
        assert ends.reduced_ms(prepared.ranks, reductions(costs)) == pytest.approx(timeline.makespan_ms, rel=1e-12)
        assert ends.busy_ms == pytest.approx([timeline.busy_ms(rank) for rank in range(num_ranks)], rel=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_microbatches", [20, 48])
def test_a_step_that_is_continued_takes_what_all_of_it_takes(name, num_microbatches):
    num_ranks = 4
    step = PreparedStep(
        lambda count: PreparedPrograms(make_schedule(name, num_ranks, count)), num_ranks, num_microbatches
    )
    assert len(step.programs[0]) < num_microbatches * len(step.ranks)
    programs = make_schedule(name, num_ranks, num_microbatches)
    for seed in range(3):
        costs = uneven(len(step.ranks), seed)
        expected = simulate(programs, costs).timeline.makespan_ms
        found = step.ends(lambda prepared, costs=costs: prepared.ends(costs))
        assert found.reduced_ms(step.ranks, reductions(costs)) == pytest.approx(expected, rel=0.01)


def test_a_step_says_whether_more_micro_batches_hold_more():
    def step(name):
        return PreparedStep(lambda count: PreparedPrograms(make_schedule(name, 2, count)), 2, 16)

    assert step("gpipe").holds_more
    assert not step("1f1b").holds_more
