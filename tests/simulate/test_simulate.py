import random
import re
import sys
from functools import partial
from itertools import pairwise
from statistics import fmean
from textwrap import dedent

import pytest
from covering import one_test_for

from hybridpp.errors import ConfigError, ScheduleError
from hybridpp.schedule import (
    SCHEDULES,
    forward_only,
    gpipe,
    make_schedule,
    one_f_one_b,
    parse_action,
    placement,
    render_grid,
)
from hybridpp.schedule.dependencies import needs, result
from hybridpp.simulate import Costs, simulate, simulate_draws
from hybridpp.timeline import Span, Timeline

# Two ranks whose backwards are in two parts: the gradient goes on before the weights are looked at.
SPLIT = "0F0 0F1 0I0 0I1 0W0 0W1 | 1F0 1I0 1F1 1I1 1W0 1W1"


def programs(text):
    """Programs from their text: ranks are separated by ``|``."""
    return tuple(tuple(map(parse_action, row.split())) for row in text.split("|"))


def picture(timeline):
    """A character per ms: the micro-batch in the first of each action's, its kind in the others, '.' for idle."""
    rows = []
    for rank in range(timeline.num_ranks):
        row = ["."] * round(timeline.makespan_ms)
        for span in timeline.of_rank(rank):
            if span.computes:
                start, end = round(span.start_ms), round(span.end_ms)
                row[start:end] = [str(span.microbatch), *span.kind * (end - start - 1)]
        rows.append("".join(row))
    return "\n".join(rows) + "\n"


def test_1f1b_drawn_by_hand():
    assert picture(simulate(one_f_one_b(3, 4), Costs(num_stages=3)).timeline) == dedent("""\
        012....0B31B.2B.3B
        .01..0B21B32B.3B..
        ..00B11B22B33B....
    """)


@one_test_for("num_stages", [1, 2, 4, 7])
@one_test_for("num_microbatches", [1, 3, 8, 20])
def test_1f1b_and_gpipe_idle_as_their_formula_says(num_stages, num_microbatches):
    formula = (num_stages - 1) / (num_microbatches + num_stages - 1)
    costs = Costs(num_stages=num_stages, forward_ms=0.7, input_gradient_ms=0.9, weight_gradient_ms=0.5)
    for schedule in (one_f_one_b, gpipe):
        simulation = simulate(schedule(num_stages, num_microbatches), costs)
        assert simulation.idle_share == pytest.approx(formula)
        assert simulation.timeline.makespan_ms == pytest.approx((num_microbatches + num_stages - 1) * 2.1)


def test_a_weight_gradient_fills_the_wait_for_the_next_gradient():
    simulation = simulate(programs(SPLIT), Costs(num_stages=2))
    assert picture(simulation.timeline) == "01.0.101\n.001101.\n"
    assert simulation.idle_share == pytest.approx(4 / 16)


def test_a_heavier_last_stage_sets_the_pace():
    heavy = (1.0, 1.0, 1.5)
    costs = Costs(num_stages=3, forward_ms=heavy, input_gradient_ms=heavy, weight_gradient_ms=heavy)
    timeline = simulate(one_f_one_b(3, 5), costs).timeline
    assert timeline.busy_ms(2) == 5 * 3 * 1.5
    # It begins when the first forward has come through two stages, never waits, and its last gradient goes back.
    assert timeline.makespan_ms == 2 * 1 + 5 * 3 * 1.5 + 2 * 2


def test_a_message_takes_its_time_and_holds_nobody_up():
    costs = Costs(num_stages=2, send_ms=1.0)
    timeline = simulate(one_f_one_b(2, 2), costs).timeline
    assert picture(timeline) == "01....0B.1B\n..00B11B...\n"
    sends = [(span.rank, span.name, span.start_ms, span.end_ms) for span in timeline.spans if not span.computes]
    assert sorted(sends) == [
        (0, "0SEND_F0", 1.0, 2.0),
        (0, "0SEND_F1", 2.0, 3.0),
        (1, "1SEND_B0", 5.0, 6.0),
        (1, "1SEND_B1", 8.0, 9.0),
    ]


def test_what_a_rank_spends_on_messages_holds_it_up():
    # A send behind what another rank needs, a receive before what needs another rank's.
    timeline = simulate(one_f_one_b(2, 2), Costs(num_stages=2, post_ms=1.0)).timeline
    assert picture(timeline) == "0.1..0B..1B\n.00B..11B..\n"


def test_boundaries_have_their_own_message_times_and_none_within_a_rank():
    # Stages 0 and 3 on rank 0, 1 and 2 on rank 1: nothing is sent from 1 to 2.
    there_and_back = programs("0F0 3F0 3B0 0B0 | 1F0 2F0 2B0 1B0")
    timeline = simulate(there_and_back, Costs(num_stages=4, send_ms=(2.0, 100.0, 3.0))).timeline
    assert timeline.makespan_ms == 4 * 1 + 4 * 2 + 2 * (2 + 3)
    assert {span.name for span in timeline.spans if not span.computes} == {
        "0SEND_F0",
        "2SEND_F0",
        "3SEND_B0",
        "1SEND_B0",
    }


def test_forwards_alone_can_be_simulated():
    assert simulate(forward_only((0, 1, 2), 4), Costs(num_stages=3)).timeline.makespan_ms == 6


def test_the_peaks_of_memory():
    costs = Costs(num_stages=3, activation_bytes=(10.0, 20.0, 30.0))
    simulation = simulate(one_f_one_b(3, 8), costs)
    assert simulation.peak_activations == (3, 2, 1)
    assert simulation.peak_bytes == (30, 40, 30)


def test_what_a_split_backward_holds_until_the_weights_are_done():
    costs = Costs(num_stages=2, activation_bytes=10.0, weight_gradient_bytes=4.0)
    simulation = simulate(programs(SPLIT), costs)
    assert simulation.peak_activations == (2, 2)
    # Rank 1 after 1F1: one activation and what 1W0 needs.
    assert simulation.peak_bytes == (20, 14)


@one_test_for("name", list(SCHEDULES))
@one_test_for(("num_ranks", "num_microbatches"), [(1, 2), (3, 5), (4, 8)])
def test_at_unit_costs_it_is_the_grid(name, num_ranks, num_microbatches):
    schedule = make_schedule(name, num_ranks, num_microbatches)
    timeline = simulate(schedule, Costs(num_stages=len(placement(schedule)))).timeline
    for row, line in enumerate(render_grid(schedule).splitlines()):
        cells = line.split("|")[1].split()
        starts = {cell: slot for slot, cell in enumerate(cells) if cell not in (".", "---")}
        assert starts == {span.name: span.start_ms for span in timeline.of_rank(row)}
        assert len(cells) == timeline.makespan_ms


@one_test_for(
    "schedule",
    [
        *(make_schedule(name, 3, 7) for name in SCHEDULES),
        programs(SPLIT),
        # Whole and split backwards in one plan.
        programs("0F0 3F0 3B0 0B0 | 1F0 2F0 2I0 1I0 2W0 1W0"),
    ],
)
@one_test_for("seed", range(4))
def test_ranks_do_one_thing_at_a_time_in_order_and_after_what_it_needs(schedule, seed):
    rank_of = placement(schedule)
    stages = range(len(rank_of))
    costs = Costs(
        num_stages=len(rank_of),
        forward_ms=tuple(((seed + 1) * 7919 * (stage + 3) % 13) / 10 for stage in stages),
        input_gradient_ms=tuple(((seed + 2) * 104729 * (stage + 5) % 17) / 10 for stage in stages),
        weight_gradient_ms=0.3 * seed,
        send_ms=tuple((seed * 31 * (stage + 1) % 7) / 10 for stage in stages[1:]),
    )
    timeline = simulate(schedule, costs).timeline
    ends = {}
    for span in timeline.spans:
        if span.computes:
            ends[result(parse_action(span.name))] = span.end_ms
    for rank, program in enumerate(schedule):
        spans = sorted((span for span in timeline.of_rank(rank) if span.computes), key=lambda span: span.start_ms)
        assert all(before.end_ms <= after.start_ms for before, after in pairwise(spans))
        by_name = {span.name: span for span in spans}
        assert [by_name[str(action)].start_ms for action in program] == sorted(span.start_ms for span in spans)
        free_ms = 0.0
        for action in program:
            span = by_name[str(action)]
            arrivals = [
                ends[need] + (costs.message_ms(need.stage, action.stage) if rank_of[need.stage] != rank else 0)
                for need in needs(action, len(rank_of))
            ]
            # No sooner than it can, and no later.
            assert span.start_ms == max(free_ms, *arrivals, 0.0)
            assert span.end_ms == span.start_ms + costs.compute_ms(action.stage, action.kind)
            free_ms = span.end_ms


def test_running_further_ahead_hides_slow_messages():
    costs = Costs(num_stages=4, send_ms=0.5)
    waits = {name: simulate(make_schedule(name, 4, 16), costs).idle_share for name in ("zb-h1", "eager-1f1b")}
    assert waits["eager-1f1b"] < 0.75 * waits["zb-h1"]


def test_zb_h2_hardly_idles_in_steps_that_overlap():
    schedule, costs = make_schedule("zb-h2", 4, 8), Costs(num_stages=4)
    assert simulate(schedule, costs).idle_share == pytest.approx(1 / 9)
    assert simulate(schedule, costs, 10).idle_share == pytest.approx(3 / 243)
    assert simulate(schedule, costs, 10, barrier=True).idle_share == pytest.approx(1 / 9)


@one_test_for("name", SCHEDULES)
@one_test_for("barrier", [False, True])
def test_several_steps_hold_what_one_holds_and_take_no_longer(name, barrier):
    schedule = make_schedule(name, 3, 4)
    costs = Costs(num_stages=len(placement(schedule)), send_ms=0.2, activation_bytes=3, weight_gradient_bytes=1)
    one, four = simulate(schedule, costs), simulate(schedule, costs, 4, barrier=barrier)
    assert (four.peak_activations, four.peak_bytes) == (one.peak_activations, one.peak_bytes)
    computed = [(span.stage, span.kind, span.microbatch) for span in four.timeline.spans if span.computes]
    assert len(set(computed)) == len(computed) == 4 * sum(map(len, schedule))
    assert {span.microbatch for span in four.timeline.spans} == set(range(16))
    assert four.timeline.makespan_ms <= 4 * one.timeline.makespan_ms + 1e-9
    if barrier:
        assert four.timeline.makespan_ms == pytest.approx(4 * one.timeline.makespan_ms)


def test_no_step_is_refused():
    with pytest.raises(ConfigError, match=re.escape("num_steps must be at least 1: got 0.")):
        simulate(one_f_one_b(2, 2), Costs(num_stages=2), 0)
    text = f"at most {2**21} actions are simulated: got num_steps={10**9} of 8 actions each. Use at most {2**18} steps."
    with pytest.raises(ConfigError, match=re.escape(text)):
        simulate(one_f_one_b(2, 2), Costs(num_stages=2), 10**9)


def test_a_heavier_last_stage_costs_zero_bubble_v_most_of_what_it_gains():
    heavy = (1.0,) * 7 + (1.5,)
    unequal = Costs(num_stages=8, forward_ms=heavy, input_gradient_ms=heavy, weight_gradient_ms=heavy)
    schedule = make_schedule("zb-v", 4, 16)
    assert simulate(schedule, Costs(num_stages=8)).idle_share == pytest.approx(3 / 99)
    assert simulate(schedule, unequal).idle_share == pytest.approx(0.16, abs=0.01)


def num_calls(function):
    """How many functions of Python are called: what takes the time, and the same on every machine."""
    called = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: called.append(None) if event == "call" else None)
    try:
        function()
    finally:
        sys.setprofile(before)
    return len(called)


def test_the_work_of_a_simulation_grows_as_the_number_of_actions_does():
    costs = Costs(num_stages=8)
    few, many = (num_calls(partial(simulate, one_f_one_b(8, number), costs)) for number in (64, 256))
    assert many < 4.2 * few


def test_programs_that_wait_for_ever_are_refused_by_the_checker():
    with pytest.raises(ScheduleError, match="1B0"):
        simulate(programs("0F0 0B0 | 1B0 1F0"), Costs(num_stages=2))


def test_costs_of_another_number_of_stages_are_refused():
    message = "the schedule has 2 stages, the costs are for 3. Give costs for each stage."
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        simulate(one_f_one_b(2, 2), Costs(num_stages=3))


def scattered(num_steps, seed=0):
    """Steps of 1F1B on two ranks in which a forward takes 1 or 3 ms."""
    generator = random.Random(seed)
    spans = []
    for _ in range(num_steps):
        for stage in (0, 1):
            spans.append(Span(stage, stage, "F", 0, 0.0, generator.choice([1.0, 3.0])))
            spans.append(Span(stage, stage, "B", 0, 0.0, 4.0))
    return Timeline(tuple(spans))


def test_steps_whose_times_scatter_take_longer_than_their_means_say():
    plan, run = one_f_one_b(2, 8), scattered(50)
    of_means_ms = simulate(plan, Costs.from_timeline(run, 2)).timeline.makespan_ms
    draws = [draw.timeline.makespan_ms for draw in simulate_draws(plan, run, num_draws=200)]
    # Of the two forwards that run at once the longer one counts: 2.5 ms on average, not 2.
    assert of_means_ms == pytest.approx(9 * 6, abs=1)
    assert fmean(draws) == pytest.approx(of_means_ms + 7 * 0.5, abs=1.5)
    assert min(draws) < of_means_ms < max(draws)


def test_draws_are_the_same_for_a_seed_and_have_only_times_that_were_seen():
    plan, run = one_f_one_b(2, 4), scattered(5)
    first, again, other = (simulate_draws(plan, run, 3, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    seen = {span.duration_ms for draw in first for span in draw.timeline.spans if span.kind == "F"}
    assert seen == {1.0, 3.0}


def test_times_that_do_not_scatter_give_the_simulation_of_their_costs():
    costs = Costs(num_stages=2, forward_ms=(1.0, 2.0), backward_ms=(2.0, 3.5))
    run = simulate(one_f_one_b(2, 4), costs)
    drawn = simulate_draws(one_f_one_b(2, 4), run.timeline, num_draws=1)
    assert drawn[0].timeline.makespan_ms == pytest.approx(run.timeline.makespan_ms)
    assert drawn[0].peak_activations == run.peak_activations


def test_a_run_of_other_kinds_of_actions_has_nothing_to_draw():
    message = (
        "the measured run has no I of stage 0, which the programs have. Measure the same schedule, or simulate with "
        "Costs.from_timeline, which converts between B and I with W."
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        simulate_draws(make_schedule("zb-h1", 2, 4), scattered(1))


def reductions(programs, num_steps=1, **costs):
    timeline = simulate(programs, Costs(num_stages=len(placement(programs)), **costs), num_steps).timeline
    return [
        (span.rank, span.stage, span.start_ms, span.end_ms) for span in timeline.spans if span.kind == "REDUCE_GRAD"
    ], timeline.makespan_ms


def test_a_step_ends_with_the_reductions_of_its_stages():
    free = simulate(one_f_one_b(2, 4), Costs(num_stages=2)).timeline
    found, end_ms = reductions(one_f_one_b(2, 4), reduce_ms=(5.0, 2.0))
    # Stage 1 is done first, and its reduction is over when that of stage 0 begins.
    ends = {rank: max(span.end_ms for span in free.of_rank(rank) if span.computes) for rank in (0, 1)}
    assert sorted(found) == [(0, 0, ends[0], ends[0] + 5), (1, 1, ends[1], ends[1] + 2)]
    assert end_ms == ends[0] + 5


def test_a_chunk_is_reduced_while_the_other_still_runs_and_one_at_a_time():
    programs = make_schedule("interleaved", 2, 4, 2)
    found, end_ms = reductions(programs, reduce_ms=3.0)
    plain = simulate(programs, Costs(num_stages=4)).timeline.makespan_ms
    assert end_ms < plain + 6
    for rank in (0, 1):
        (_, later, _, first_end), (_, earlier, second_start, _) = [entry for entry in found if entry[0] == rank]
        assert later == earlier + 2
        assert second_start >= first_end


def test_the_next_step_of_a_rank_begins_when_its_gradients_are_reduced():
    found, end_ms = reductions(one_f_one_b(1, 2), 3, reduce_ms=5.0)
    assert [start for _, _, start, _ in found] == [6, 17, 28]
    assert end_ms == 33
