import random
import re
from dataclasses import replace

import pytest

from hybridpp.errors import ConfigError, ScheduleError
from hybridpp.schedule import SCHEDULES, check_program
from hybridpp.simulate import Costs, search_schedule, simulate

MIB = 2**20


def random_costs(seed):
    """Costs, ranks and micro-batches."""
    generator = random.Random(seed)
    num_ranks, chunks, num_microbatches = generator.randint(1, 4), 1 + seed % 2, generator.randint(1, 8)
    num_stages = num_ranks * chunks

    def numbers(low, high, count=num_stages):
        return tuple(generator.uniform(low, high) for _ in range(count))

    costs = Costs(
        num_stages=num_stages,
        forward_ms=numbers(0.5, 1.5),
        input_gradient_ms=numbers(0.5, 1.5),
        weight_gradient_ms=numbers(0.5, 1.5),
        backward_ms=numbers(1.0, 2.5) if seed % 3 else None,
        send_ms=numbers(0.0, 0.5, num_stages - 1),
        post_ms=generator.uniform(0.0, 0.1),
        reduce_ms=0.2 * (seed % 4),
        activation_bytes=numbers(0.1, 1.0),
        weight_gradient_bytes=numbers(0.0, 0.5),
    )
    return costs, num_ranks, num_microbatches


def named(costs, num_ranks, num_microbatches):
    """The simulation of each named schedule with these stages."""
    chunks = costs.num_stages // num_ranks
    entries = [entry for entry in SCHEDULES.values() if entry.num_chunks == chunks or entry.takes_chunks]
    return [simulate(entry.make(num_ranks, num_microbatches, chunks), costs) for entry in entries]


def checked(found, costs, num_microbatches, caps):
    check_program(found.programs, costs.num_stages, num_microbatches)
    simulation = simulate(found.programs, costs.with_recomputation(found.recomputed_stages))
    assert simulation.timeline.makespan_ms == found.step_ms >= found.lower_bound_ms * (1 - 1e-9)
    assert found.gap == pytest.approx(found.step_ms / found.lower_bound_ms - 1)
    assert f"{replace(found, lower_bound_ms=found.step_ms * (1 + 1e-12)).gap:.1f}" == "0.0"
    for simulated, peak, cap in zip(simulation.peak_bytes, found.peak_bytes, caps, strict=True):
        assert simulated <= peak <= cap * (1 + 2e-9)
    return found


@pytest.mark.parametrize("seed", range(12))
def test_never_worse_than_a_named_schedule_that_fits(seed):
    costs, num_ranks, num_microbatches = random_costs(seed)
    simulations = named(costs, num_ranks, num_microbatches)
    # Every second profile has just the memory of a named schedule.
    cap = None if seed % 4 < 2 else min(max(one.peak_bytes) for one in simulations)
    found = search_schedule(costs, num_ranks, num_microbatches, memory_bytes=cap, num_trials=16)
    checked(found, costs, num_microbatches, [float("inf") if cap is None else cap] * num_ranks)
    fitting = [one for one in simulations if cap is None or max(one.peak_bytes) <= cap]
    assert found.step_ms <= min(one.timeline.makespan_ms for one in fitting)


def test_all_ranks_find_the_same():
    costs, num_ranks, num_microbatches = random_costs(5)
    first, second = (search_schedule(costs, num_ranks, num_microbatches, num_trials=40) for _ in range(2))
    assert first == second


def test_a_slow_stage_is_scheduled_better_than_by_name():
    slow = (1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 1.0, 1.0)
    costs = Costs(num_stages=8, forward_ms=slow, weight_gradient_ms=slow, send_ms=0.3)
    found = search_schedule(costs, 4, 8)
    assert found.step_ms < min(one.timeline.makespan_ms for one in named(costs, 4, 8))
    assert found.gap < 0.02


UNIFORM = Costs(num_stages=4, activation_bytes=10.0)
RECOMPUTING = replace(UNIFORM, recompute_ms=0.5, recomputed_bytes=1.0)


def test_nothing_is_recomputed_where_memory_suffices():
    assert search_schedule(RECOMPUTING, 4, 8, num_trials=8).recomputed_stages == ()
    assert search_schedule(RECOMPUTING, 4, 8, memory_bytes=70.0, num_trials=8).recomputed_stages == ()


def test_stages_recompute_where_the_cap_forces_them():
    costs = replace(RECOMPUTING, activation_bytes=(10.0, 10.0, 30.0, 10.0), recompute_ms=0.1)
    found = checked(search_schedule(costs, 4, 8, memory_bytes=40.0, num_trials=60), costs, 8, [40.0] * 4)
    assert 2 in found.recomputed_stages
    without = replace(costs, recomputed_bytes=None)
    assert found.step_ms < search_schedule(without, 4, 8, memory_bytes=40.0, num_trials=60).step_ms


def test_each_rank_has_its_own_cap():
    caps = (40.0, 30.0, 20.0, 10.0)
    checked(search_schedule(UNIFORM, 4, 8, memory_bytes=caps, num_trials=20), UNIFORM, 8, caps)


@pytest.mark.parametrize("stages", [4, 8, 12])
def test_memory_for_one_microbatch_is_enough(stages):
    costs = Costs(num_stages=stages, activation_bytes=0.1)  # sums of 0.1 are rounded
    cap = 0.1 * (stages // 4)
    found = search_schedule(costs, 4, 3, memory_bytes=cap, num_trials=0)
    checked(found, costs, 3, [cap] * 4)
    assert found.name == "greedy"


@pytest.mark.parametrize(("num_ranks", "stages", "num_microbatches"), [(1, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 5)])
def test_the_smallest_sizes(num_ranks, stages, num_microbatches):
    costs = Costs(num_stages=stages)
    found = search_schedule(costs, num_ranks, num_microbatches)
    assert checked(found, costs, num_microbatches, [0.0] * num_ranks).gap == pytest.approx(0)


def test_stages_that_take_no_time_have_no_gap():
    costs = Costs(num_stages=2, forward_ms=0.0, input_gradient_ms=0.0, weight_gradient_ms=0.0)
    assert search_schedule(costs, 2, 3, num_trials=10).gap == 0


@pytest.mark.parametrize(
    ("costs", "others", "error", "message"),
    [
        (
            replace(UNIFORM, activation_bytes=(MIB, MIB, 3 * MIB, MIB)),
            {"memory_bytes": 2 * MIB},
            ScheduleError,
            "no schedule fits: rank 2 holds at least 3,145,728 bytes for one micro-batch, and it can hold 2,097,152. "
            "Use smaller micro-batches, recompute (recomputed_bytes), or move layers to another rank.",
        ),
        (
            RECOMPUTING,
            {"memory_bytes": (20.0, 9.0, 20.0, 20.0)},
            ScheduleError,
            "no schedule fits: rank 1 holds at least 10 bytes for one micro-batch, and it can hold 9. "
            "Use smaller micro-batches, or move layers to another rank.",
        ),
        (Costs(num_stages=6), {}, ConfigError, "every rank needs as many stages: got 6 stages for 4 ranks."),
        (UNIFORM, {"memory_bytes": (1.0, 2.0)}, ConfigError, "one number, or one per rank: got 2 for 4 ranks."),
        (UNIFORM, {"memory_bytes": -1.0}, ConfigError, "memory_bytes must be at least 0: got -1.0."),
        (UNIFORM, {"memory_bytes": float("nan")}, ConfigError, "memory_bytes must be at least 0: got nan."),
        (UNIFORM, {"num_trials": -1}, ConfigError, "num_trials must be at least 0: got -1."),
        (UNIFORM, {"num_microbatches": 0}, ScheduleError, "got num_ranks=4, num_microbatches=0."),
    ],
)
def test_what_cannot_be_searched_is_refused(costs, others, error, message):
    with pytest.raises(error, match=re.escape(message)):
        search_schedule(costs, **{"num_ranks": 4, "num_microbatches": 4} | others)
