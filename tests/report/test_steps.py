"""How long steps took, and what the ranks' time went to."""

import pytest
from recordings import recorded

from hybridpp.report import RankAction, RankRecord
from hybridpp.report.steps import Step, median_step, steps_of, use_of


def test_a_step_is_from_the_first_rank_to_the_last():
    steps = steps_of(recorded(num_steps=3))
    # Two ranks, four micro-batches of 2 and 4 ms: 30 ms; 1 ms to read, 3 to end.
    assert [step.duration_ms for step in steps] == pytest.approx([34, 34, 34])
    assert [step.number for step in steps] == [0, 1, 2]
    assert steps_of(recorded(num_steps=0)) == []
    assert median_step([]) is None


def test_the_median_of_an_even_number_is_a_step_that_ran():
    steps = [Step(number, 0.0, end_ms) for number, end_ms in enumerate((9.0, 1.0, 3.0, 5.0))]
    assert median_step(steps) == Step(2, 0.0, 3.0)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_the_uses_of_a_ranks_time_add_up_to_the_step(schedule):
    recording = recorded(schedule, num_ranks=4, num_microbatches=6)
    (step,) = steps_of(recording)
    for rank in recording.ranks:
        use = use_of(rank, step)
        assert sum(use.ms.values()) == pytest.approx(step.duration_ms)
        assert use.ms["F"] == pytest.approx(12)
        assert use.computing_ms == pytest.approx(recording.timeline().busy_ms(rank.pp))
        # It waits for other ranks for half of the time in which it reads.
        assert (use.ms["read"], use.ms["ranks"]) == pytest.approx((0.5, 0.5))
        assert use.ms["update"] == pytest.approx(1)


def test_waits_inside_an_action_are_no_computation():
    action = RankAction(0, 0, "F", 0, ready_ms=1, start_ms=4, end_ms=10, waited_ms=2)
    sent = RankAction(0, 0, "SEND_F", 0, ready_ms=10, start_ms=10, end_ms=11)
    rank = RankRecord(rank=0, dp=0, pp=0, tp=0, device="cpu", actions=(action, sent))
    (step,) = steps_of(recorded())
    use = use_of(rank, step._replace(start_ms=0, end_ms=20))
    found = {name: ms for name, ms in use.ms.items() if ms}
    assert found == {"F": 4, "collectives": 2, "messages": 3, "communication": 1, "outside": 10}
