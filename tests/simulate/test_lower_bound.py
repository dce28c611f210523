import random
from itertools import permutations, product

import pytest

from hybridpp.errors import ScheduleError
from hybridpp.schedule import SCHEDULES, Action, ActionKind, looped, make_schedule, placement, v_shaped, zb_h2, zb_v
from hybridpp.simulate import Costs, search_schedule, simulate
from hybridpp.simulate.lower_bound import lower_bound_ms


def orders(stage, num_microbatches=2):
    """Every order of a stage's actions, with and without splitting."""
    forwards = [Action(stage, ActionKind.FORWARD, number) for number in range(num_microbatches)]
    backs = [
        (
            (Action(stage, ActionKind.BACKWARD, number),),
            (Action(stage, ActionKind.INPUT_GRADIENT, number), Action(stage, ActionKind.WEIGHT_GRADIENT, number)),
        )
        for number in range(num_microbatches)
    ]
    for parts in product(*backs):
        rows = [(forward, *part) for forward, part in zip(forwards, parts, strict=True)]
        letters = [number for number, row in enumerate(rows) for _ in row]
        for order in sorted(set(permutations(letters))):
            left = [iter(row) for row in rows]
            yield tuple(next(left[number]) for number in order)


@pytest.mark.parametrize(
    "costs",
    [
        Costs(num_stages=2, forward_ms=(1.0, 0.3), input_gradient_ms=(0.6, 1.2), send_ms=0.4, post_ms=0.1),
        Costs(
            num_stages=2, forward_ms=(0.3, 1.5), backward_ms=(1.2, 2.0), weight_gradient_ms=(2.0, 0.5), reduce_ms=0.7
        ),
    ],
)
def test_no_order_of_two_microbatches_on_two_ranks_is_shorter(costs):
    times = []
    for programs in product(orders(0), orders(1)):
        try:
            times.append(simulate(programs, costs).timeline.makespan_ms)
        except ScheduleError:  # a deadlock
            continue
    assert len(times) > 500
    shortest = min(times)
    assert lower_bound_ms(costs, (0, 1), 2) <= shortest + 1e-9
    found = search_schedule(costs, 2, 2, num_trials=100)
    assert shortest - 1e-9 <= found.step_ms <= 1.05 * shortest


def test_schedules_without_idle_time_reach_the_bound():
    assert lower_bound_ms(Costs(num_stages=4), looped(4), 8) == 3 + 3 * 8
    assert simulate(zb_h2(4, 8), Costs(num_stages=4)).timeline.makespan_ms == 3 + 3 * 8
    assert lower_bound_ms(Costs(num_stages=1), (0,), 5) == 15


def test_one_microbatch_takes_its_path():
    costs = Costs(num_stages=3, send_ms=0.5)
    # F and I of each stage, and W of the first.
    assert lower_bound_ms(costs, looped(3), 1) == 3 + 3 + 1 + 4 * 0.5
    assert simulate(zb_h2(3, 1), costs).timeline.makespan_ms == 9


def test_nothing_is_sent_within_a_rank():
    costs = Costs(num_stages=4, send_ms=10.0)
    split_once = lower_bound_ms(costs, (0, 0, 1, 1), 1)
    assert lower_bound_ms(costs, v_shaped(2), 1) - split_once == 20
    assert lower_bound_ms(costs, looped(2, 2), 1) - split_once == 40
    assert simulate(zb_v(2, 1), costs).timeline.makespan_ms >= lower_bound_ms(costs, v_shaped(2), 1)


def test_no_order_of_what_fits_is_shorter():
    costs = Costs(
        num_stages=2,
        forward_ms=(1.0, 0.3),
        input_gradient_ms=(0.6, 1.2),
        send_ms=0.4,
        activation_bytes=(3.0, 2.0),
        weight_gradient_bytes=1.0,
    )
    bounds = {}
    for programs in product(orders(0), orders(1)):
        try:
            simulation = simulate(programs, costs)
        except ScheduleError:  # a deadlock
            continue
        caps = simulation.peak_bytes
        if caps not in bounds:
            bounds[caps] = lower_bound_ms(costs, (0, 1), 2, caps)
        assert bounds[caps] <= simulation.timeline.makespan_ms + 1e-9
    assert len(bounds) > 3
    assert max(bounds.values()) > min(bounds.values())


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 4), (4, 8)])
def test_room_for_one_microbatch_lets_one_after_the_other_through(num_stages, num_microbatches):
    costs = Costs(num_stages=num_stages, send_ms=0.5, activation_bytes=1.0)
    found = search_schedule(costs, num_stages, num_microbatches, memory_bytes=1.0, num_trials=20)
    assert found.gap < 0.25
    without = lower_bound_ms(costs, looped(num_stages), num_microbatches)
    assert found.lower_bound_ms > 1.3 * without


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_named_schedule_is_shorter_than_the_bound_in_its_memory(name):
    for seed in range(5):
        generator = random.Random(seed)
        programs = make_schedule(name, 4, 8)
        num_stages = len(placement(programs))

        def drawn(least, most, count=num_stages, generator=generator):
            return tuple(generator.uniform(least, most) for _ in range(count))

        costs = Costs(
            num_stages=num_stages,
            forward_ms=drawn(1, 2),
            input_gradient_ms=drawn(1, 2),
            weight_gradient_ms=drawn(1, 2),
            send_ms=drawn(0, 0.5, num_stages - 1),
            activation_bytes=drawn(1, 3),
        )
        simulation = simulate(programs, costs)
        bound = lower_bound_ms(costs, placement(programs), 8, simulation.peak_bytes)
        assert bound <= simulation.timeline.makespan_ms + 1e-9
