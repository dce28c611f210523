"""What a report says costs most."""

import pytest
from recordings import recorded

from hybridpp.report.advice import costs_of, slowest_stage
from hybridpp.report.prediction import predict
from hybridpp.report.steps import steps_of, use_of


def costs(recording):
    (step,) = steps_of(recording)
    return costs_of(recording, step, [use_of(rank, step) for rank in recording.ranks], predict(recording, step.number))


def test_a_short_pipeline_idles_and_a_schedule_that_idles_less_is_named():
    first, *_ = costs(recorded("1f1b", 4, 8))
    assert first.what.startswith("idle time of the pipeline, as the schedule 1f1b has it")
    assert 'schedule="zb-h1" would take' in first.way_out
    # (p - 1) slots of a forward and a backward.
    assert first.ms == pytest.approx(3 * 6)


def test_one_slow_stage_is_named_with_how_much_it_costs():
    recording = recorded(
        num_ranks=4, num_microbatches=16, forward_ms=(1.0, 1.0, 5.0, 1.0), backward_ms=(1.0, 1.0, 5.0, 1.0)
    )
    first, *_ = costs(recording)
    assert first.what == "stages of unequal length: stage 2 computes 2.50 times as long as the mean stage"
    assert slowest_stage(predict(recording, 0)) == (2, 2.5)


def test_one_rank_has_no_pipeline_to_wait_for():
    assert all("pipeline" not in cost.what for cost in costs(recorded(num_ranks=1, num_microbatches=1)))


def test_costs_come_in_order_and_small_ones_are_left_out():
    found = costs(recorded(num_ranks=2, num_microbatches=64))
    assert [cost.ms for cost in found] == sorted((cost.ms for cost in found), reverse=True)
    # Reading takes 1 ms of 390.
    assert not any("reading" in cost.what for cost in found)
