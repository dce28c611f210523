import re
from textwrap import dedent

import pytest
from covering import one_test_for
from schedule.oracle import SIZES, idle_share

from hybridpp.errors import ScheduleError
from hybridpp.schedule import (
    SCHEDULES,
    check_program,
    make_schedule,
    one_f_one_b,
    peak_activations,
    render,
    stages_placement,
)


def test_one_stage_has_one_microbatch_at_a_time():
    assert render(one_f_one_b(num_ranks=1, num_microbatches=3)) == "rank 0 | 0F0 0B0 0F1 0B1 0F2 0B2\n"


def test_1f1b_with_two_stages_and_four_microbatches():
    assert render(one_f_one_b(num_ranks=2, num_microbatches=4)) == dedent("""\
        rank 0 | 0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
        rank 1 | 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
    """)


def test_1f1b_with_four_stages_and_six_microbatches():
    assert render(one_f_one_b(num_ranks=4, num_microbatches=6)) == dedent("""\
        rank 0 | 0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0B3 0B4 0B5
        rank 1 | 1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5
        rank 2 | 2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2B5
        rank 3 | 3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5
    """)


def test_1f1b_with_fewer_microbatches_than_stages():
    assert render(one_f_one_b(num_ranks=4, num_microbatches=2)) == dedent("""\
        rank 0 | 0F0 0F1 0B0 0B1
        rank 1 | 1F0 1F1 1B0 1B1
        rank 2 | 2F0 2F1 2B0 2B1
        rank 3 | 3F0 3B0 3F1 3B1
    """)


@one_test_for(("p", "m"), SIZES)
def test_1f1b_peak_activations_and_bubble_match_the_closed_forms(p, m):
    programs = one_f_one_b(p, m)
    check_program(programs, p, m)
    assert peak_activations(programs) == tuple(min(m, p - rank) for rank in range(p))
    assert idle_share(programs) == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize(("p", "m"), [(0, 4), (2, 0), (-1, 1)])
def test_counts_below_one(p, m):
    text = f"a schedule needs every count to be at least 1: got num_ranks={p}, num_microbatches={m}."
    with pytest.raises(ScheduleError, match=f"^{re.escape(text)}$"):
        one_f_one_b(p, m)


@pytest.mark.parametrize("name", SCHEDULES)
def test_counts_with_which_planning_would_not_end(name):
    for sizes in ((4, 10**30), (10**30, 4)):
        with pytest.raises(ScheduleError, match=f"a schedule has at most {2**17} forward passes, over all stages "):
            make_schedule(name, *sizes)
    with pytest.raises(ScheduleError, match="Use fewer micro-batches, of more samples each; several calls of a step "):
        stages_placement(name, 10**30)
