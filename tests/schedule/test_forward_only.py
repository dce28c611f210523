import random
import re
from textwrap import dedent

import pytest
from schedule.oracle import SIZES_WITH_CHUNKS, makespan

from hybridpp.errors import ScheduleError
from hybridpp.schedule import ActionKind, check_program, forward_only, looped, placement, render, v_shaped


def test_forward_only_with_two_stages_and_three_microbatches():
    assert render(forward_only((0, 1), 3)) == dedent("""\
        rank 0 | 0F0 0F1 0F2
        rank 1 | 1F0 1F1 1F2
    """)


def test_forward_only_with_two_stages_per_rank():
    assert render(forward_only((0, 1, 0, 1), 4)) == dedent("""\
        rank 0 | 0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3
        rank 1 | 1F0 1F1 3F0 3F1 1F2 1F3 3F2 3F3
    """)


@pytest.mark.covering("p m", "p v")
@pytest.mark.parametrize(("p", "m", "v"), SIZES_WITH_CHUNKS)
def test_forwards_take_as_many_slots_as_the_docstring_says(p, m, v):
    programs = forward_only(looped(p, v), m)
    check_program(programs, p * v, m)
    assert makespan(programs) == m + p - 1 + (v - 1) * max(m, p)
    programs = forward_only(v_shaped(p), m)
    check_program(programs, 2 * p, m)
    assert makespan(programs) == 2 * (m + p - 1)


def test_any_placement_runs_to_its_end():
    dice = random.Random(0)
    for _ in range(200):
        p = dice.randint(1, 5)
        places = [*range(p), *(dice.randrange(p) for _ in range(dice.randint(0, 6)))]
        dice.shuffle(places)
        m = dice.randint(1, 9)
        programs = forward_only(places, m)
        check_program(programs, len(places), m)
        assert placement(programs) == tuple(places)
        assert {action.kind for row in programs for action in row} == {ActionKind.FORWARD}


def test_counts_below_one():
    for places, m, got in [((), 1, "num_stages=0, num_microbatches=1"), ((0,), 0, "num_stages=1, num_microbatches=0")]:
        text = f"a schedule needs every count to be at least 1: got {got}."
        with pytest.raises(ScheduleError, match=f"^{re.escape(text)}$"):
            forward_only(places, m)


@pytest.mark.parametrize("places", [(0, 2), (1,), (-1, 0)])
def test_ranks_without_a_stage(places):
    with pytest.raises(
        ScheduleError, match=re.escape(f"every rank from 0 to the highest needs a stage: got placement={places}.")
    ):
        forward_only(list(places), 2)
