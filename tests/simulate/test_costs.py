import dataclasses
import re

import pytest

from hybridpp.errors import ConfigError
from hybridpp.schedule import ActionKind, one_f_one_b, parse_action
from hybridpp.simulate import Costs, simulate
from hybridpp.timeline import Span, Timeline

KINDS = (ActionKind.FORWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT, ActionKind.BACKWARD)
UNEQUAL = Costs(
    num_stages=3,
    forward_ms=(1.0, 2.0, 3.0),
    input_gradient_ms=(1.5, 2.5, 3.5),
    weight_gradient_ms=0.5,
    send_ms=(0.25, 0.5),
    activation_bytes=(10.0, 20.0, 30.0),
)


def test_a_backward_takes_the_time_of_its_parts_unless_given_its_own():
    assert [UNEQUAL.compute_ms(1, kind) for kind in KINDS] == [2.0, 2.5, 0.5, 3.0]
    assert Costs(num_stages=2, backward_ms=1.5).compute_ms(1, ActionKind.BACKWARD) == 1.5


def test_by_default_every_action_takes_a_millisecond_and_a_message_none():
    costs = Costs(num_stages=2)
    assert [costs.compute_ms(0, kind) for kind in KINDS] == [1, 1, 1, 2]
    assert costs.message_ms(0, 1) == 0


def test_a_boundarys_message_time_holds_in_both_directions():
    assert [UNEQUAL.message_ms(*pair) for pair in ((0, 1), (1, 0), (1, 2), (2, 1))] == [0.25, 0.25, 0.5, 0.5]


@pytest.mark.parametrize("costs", [UNEQUAL, Costs(num_stages=1, backward_ms=3.0)])
def test_costs_come_back_from_json(costs):
    assert Costs.from_json(costs.to_json()) == costs


def test_json_may_leave_out_what_has_a_default():
    assert Costs.from_json('{"num_stages": 2, "forward_ms": [1, 2]}') == Costs(num_stages=2, forward_ms=(1, 2))


FIELDS = (
    "forward_ms, input_gradient_ms, weight_gradient_ms, backward_ms, send_ms, post_ms, reduce_ms, activation_bytes, "
    "weight_gradient_bytes, recompute_ms, recomputed_bytes"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "tea",
            "this text holds no costs: it is no JSON: Expecting value: line 1 column 1 (char 0). Write what "
            "Costs.to_json gives.",
        ),
        ("[1]", f"costs are an object with num_stages and some of {FIELDS}: got list."),
        ('{"tea": 1}', f"costs are an object with num_stages and some of {FIELDS}: got tea."),
        ('{"num_stages": "2"}', "num_stages must be an integer of at least 1: got '2'."),
        ('{"num_stages": 0}', "num_stages must be an integer of at least 1: got 0."),
        (
            '{"num_stages": 2, "forward_ms": [1]}',
            "forward_ms has 1 numbers for 2 stages. Give 2, or one number (not a list) for all.",
        ),
        (
            '{"num_stages": 3, "send_ms": [1, 1, 1]}',
            "send_ms has 3 numbers for the 2 boundaries of 3 stages. Give 2, or one number (not a list) for all.",
        ),
        ('{"num_stages": 2, "forward_ms": -1}', "forward_ms must be a number of at least 0, or one per stage: got -1."),
        (
            '{"num_stages": 2, "send_ms": [NaN]}',
            "this text holds no costs: NaN is there, which is no number of JSON. Write what Costs.to_json gives.",
        ),
        (
            '{"num_stages": 1, "backward_ms": "1"}',
            "backward_ms must be a number of at least 0, or one per stage: got '1'.",
        ),
    ],
)
def test_costs_that_cannot_be_are_refused(text, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        Costs.from_json(text)


def test_a_simulated_run_gives_its_costs_back():
    measured = Costs.from_timeline(simulate(one_f_one_b(3, 4), UNEQUAL).timeline, num_stages=3)
    assert measured.forward_ms == UNEQUAL.forward_ms
    assert measured.backward_ms == (2.0, 3.0, 4.0)
    # Of a whole backward, each part is taken to be half.
    assert measured.input_gradient_ms == measured.weight_gradient_ms == (1.0, 1.5, 2.0)
    assert measured.send_ms == UNEQUAL.send_ms


def test_a_run_with_split_backwards_gives_each_part_its_time():
    split = tuple(tuple(map(parse_action, row.split())) for row in ("0F0 0I0 0W0", "1F0 1I0 1W0", "2F0 2I0 2W0"))
    measured = Costs.from_timeline(simulate(split, UNEQUAL).timeline, num_stages=3)
    assert measured.input_gradient_ms == UNEQUAL.input_gradient_ms
    assert measured.weight_gradient_ms == (0.5, 0.5, 0.5)
    assert measured.backward_ms == (2.0, 3.0, 4.0)


def test_the_mean_stands_for_all_microbatches():
    times = [(0.0, 2.0), (2.0, 3.0), (3.0, 12.0)]
    spans = [Span(0, 0, "F", number, *pair) for number, pair in enumerate(times)]
    costs = Costs.from_timeline(Timeline((*spans, Span(0, 0, "B", 0, 12.0, 16.0))), num_stages=1)
    assert (costs.forward_ms, costs.backward_ms, costs.send_ms) == ((4.0,), (4.0,), ())


def test_message_time_of_a_rank_is_measured_where_there_are_receives():
    spans = [Span(0, 0, "F", 0, 0.0, 2.0), Span(0, 0, "B", 0, 9.0, 12.0)]
    spans += [Span(1, 1, "F", 0, 3.0, 5.0), Span(1, 1, "B", 0, 5.0, 8.0)]
    sends = [Span(0, 0, "SEND_F", 0, 2.0, 2.5), Span(1, 1, "SEND_B", 0, 8.0, 8.5)]
    assert Costs.from_timeline(Timeline((*spans, *sends)), num_stages=2).post_ms == (0.0, 0.0)
    receives = [Span(0, 0, "RECV_B", 0, 2.5, 2.75), Span(1, 1, "RECV_F", 0, 0.0, 0.1)]
    costs = Costs.from_timeline(Timeline((*spans, *sends, *receives)), num_stages=2)
    assert costs.post_ms == pytest.approx((0.375, 0.3))
    assert costs.posting_ms(1) == pytest.approx(0.3)


@pytest.mark.parametrize(("kinds", "missing"), [("B", "forward"), ("F", "backward"), ("FI", "backward")])
def test_a_run_that_lacks_a_pass_is_refused(kinds, missing):
    spans = tuple(Span(0, 0, kind, 0, 0.0, 1.0) for kind in kinds)
    message = f"the timeline has no {missing} of stage 0. Measure a complete training step, on all ranks."
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        Costs.from_timeline(Timeline(spans), num_stages=1)


RECOMPUTING = Costs(
    num_stages=3,
    input_gradient_ms=(1.0, 2.0, 3.0),
    activation_bytes=10.0,
    recompute_ms=(0.5, 0.25, 0.125),
    recomputed_bytes=(1.0, 2.0, 3.0),
)


def test_stages_that_recompute_hold_less_and_take_longer():
    costs = RECOMPUTING.with_recomputation([1])
    assert [costs.compute_ms(stage, ActionKind.INPUT_GRADIENT) for stage in range(3)] == [1.0, 2.25, 3.0]
    assert [costs.compute_ms(stage, ActionKind.BACKWARD) for stage in range(3)] == [2.0, 3.25, 4.0]
    assert [costs.held_bytes(stage, ActionKind.FORWARD) for stage in range(3)] == [10.0, 2.0, 10.0]
    given = dataclasses.replace(RECOMPUTING, backward_ms=2.0).with_recomputation([1])
    assert [given.compute_ms(stage, ActionKind.BACKWARD) for stage in range(3)] == [2.0, 2.25, 2.0]


def test_to_recompute_twice_changes_nothing():
    costs = RECOMPUTING.with_recomputation([0, 2])
    assert costs.with_recomputation([0, 2]) == costs
    assert RECOMPUTING.with_recomputation([]) is RECOMPUTING


@pytest.mark.parametrize(
    ("costs", "stages", "message"),
    [
        (Costs(num_stages=2), [0], "stages recompute only where recomputed_bytes is known."),
        (RECOMPUTING, [3], "there are 3 stages, 0 to 2: got 3."),
    ],
)
def test_recomputation_that_is_impossible_is_refused(costs, stages, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        costs.with_recomputation(stages)
