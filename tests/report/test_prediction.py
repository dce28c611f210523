"""Recorded steps against the simulator: what it made up, it must find again."""

import pytest
from recordings import recorded

from hybridpp.report.prediction import balanced_ms, other_schedules, predict


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "num_microbatches"),
    [("1f1b", 1, 1), ("1f1b", 2, 4), ("gpipe", 3, 5), ("zb-h1", 4, 6), ("interleaved", 2, 4), ("zb-v", 2, 6)],
)
def test_a_simulated_step_is_predicted_exactly(schedule, num_ranks, num_microbatches):
    recording = recorded(schedule, num_ranks, num_microbatches, num_steps=2)
    prediction = predict(recording, step=1)
    assert prediction.predicted_ms == pytest.approx(prediction.measured.makespan_ms)
    assert prediction.steps == (0, 1)
    assert prediction.measured_ms == pytest.approx([prediction.predicted_ms] * 2)


def test_every_pipeline_has_a_prediction():
    recording = recorded(dp_size=2, tp_size=2)
    assert {predict(recording, 0, dp, tp).predicted_ms for dp, tp in recording.pipelines()} == {30.0}


def test_steps_that_were_disturbed_do_not_count():
    recording = recorded(num_steps=3)
    slow = [
        action._replace(ready_ms=3 * action.ready_ms, start_ms=3 * action.start_ms, end_ms=3 * action.end_ms)
        for action in recording.ranks[0].actions
        if action.step == 0
    ]
    rest = [action for action in recording.ranks[0].actions if action.step]
    first = type(recording.ranks[0])(**{**vars(recording.ranks[0]), "actions": (*slow, *rest)})
    changed = type(recording)(**{**vars(recording), "ranks": (first, *recording.ranks[1:])})
    assert predict(changed, step=1).steps == (1, 2)
    assert predict(changed, step=0).steps == (0,)


def test_an_evaluation_has_no_prediction_and_says_why():
    recording = recorded()
    ranks = tuple(
        type(rank)(**{**vars(rank), "actions": tuple(action for action in rank.actions if action.kind == "F")})
        for rank in recording.ranks
    )
    forward_only = type(recording)(**{**vars(recording), "ranks": ranks})
    assert predict(forward_only, step=0) == "the step has no backward pass"


def test_a_rank_that_lacks_actions_is_told_in_words():
    recording = recorded()
    first = type(recording.ranks[0])(**{**vars(recording.ranks[0]), "actions": recording.ranks[0].actions[:3]})
    found = predict(type(recording)(**{**vars(recording), "ranks": (first, *recording.ranks[1:])}), step=0)
    assert isinstance(found, str)
    assert not found.endswith(".")


def test_other_schedules_hold_no_more_and_come_in_order():
    found = other_schedules(predict(recorded("1f1b", 4, 8), 0))
    names = [one.name for one in found]
    assert names[0] == "zb-h1"
    assert "gpipe" not in names, "it holds more"
    assert "zb-v" not in names, "it has other stages"
    assert [one.step_ms for one in found] == sorted(one.step_ms for one in found)


def test_an_uneven_stage_costs_what_balance_would_save():
    even = predict(recorded(num_ranks=4, num_microbatches=8), 0)
    assert balanced_ms(even) == pytest.approx(even.predicted_ms)
    uneven = predict(recorded(num_ranks=4, num_microbatches=8, forward_ms=(1.0, 1.0, 1.0, 5.0)), 0)
    assert balanced_ms(uneven) < 0.8 * uneven.predicted_ms
