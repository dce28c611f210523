import re
from textwrap import dedent

import pytest

from hybridpp.errors import ScheduleError
from hybridpp.schedule import Kind, check_program, forward_only, one_f_one_b, peak_in_flight, render

SIZES = [(1, 1), (1, 4), (2, 1), (2, 4), (3, 4), (4, 2), (4, 4), (4, 9), (6, 3)]


def test_one_stage_has_one_microbatch_at_a_time():
    assert render(one_f_one_b(num_stages=1, num_microbatches=3)) == "rank 0 | 0F0 0B0 0F1 0B1 0F2 0B2\n"


def test_1f1b_with_two_stages_and_four_microbatches():
    assert render(one_f_one_b(num_stages=2, num_microbatches=4)) == dedent("""\
        rank 0 | 0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
        rank 1 | 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
    """)


def test_1f1b_with_four_stages_and_six_microbatches():
    assert render(one_f_one_b(num_stages=4, num_microbatches=6)) == dedent("""\
        rank 0 | 0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0B3 0B4 0B5
        rank 1 | 1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5
        rank 2 | 2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2B5
        rank 3 | 3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5
    """)


def test_1f1b_with_fewer_microbatches_than_stages():
    assert render(one_f_one_b(num_stages=4, num_microbatches=2)) == dedent("""\
        rank 0 | 0F0 0F1 0B0 0B1
        rank 1 | 1F0 1F1 1B0 1B1
        rank 2 | 2F0 2F1 2B0 2B1
        rank 3 | 3F0 3B0 3F1 3B1
    """)


def test_forward_only_with_two_stages_and_three_microbatches():
    assert render(forward_only(num_stages=2, num_microbatches=3)) == dedent("""\
        rank 0 | 0F0 0F1 0F2
        rank 1 | 1F0 1F1 1F2
    """)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_1f1b_keeps_at_most_p_minus_s_activations(p, m):
    for stage, row in enumerate(one_f_one_b(p, m)):
        assert peak_in_flight(row) == min(p - stage, m)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_1f1b_idles_p_minus_1_of_m_plus_p_minus_1(p, m):
    assert idle_share(one_f_one_b(p, m)) == pytest.approx((p - 1) / (m + p - 1))


def idle_share(programs):
    """Idle part of all ranks' time, where a forward takes 1, a backward 2, and messages nothing."""
    ends = {}
    place, clock = [0] * len(programs), [0] * len(programs)
    while any(place[rank] < len(row) for rank, row in enumerate(programs)):
        for rank, row in enumerate(programs):
            if place[rank] == len(row):
                continue
            stage, kind, microbatch = row[place[rank]]
            source = stage - 1 if kind is Kind.FORWARD else stage + 1
            arrived = ends.get((source, kind, microbatch)) if 0 <= source < len(programs) else 0
            if arrived is not None:
                clock[rank] = max(clock[rank], arrived) + (1 if kind is Kind.FORWARD else 2)
                ends[row[place[rank]]] = clock[rank]
                place[rank] += 1
    busy = sum(1 if action.kind is Kind.FORWARD else 2 for row in programs for action in row)
    return 1 - busy / (len(programs) * max(clock))


@pytest.mark.parametrize("make", [one_f_one_b, forward_only])
@pytest.mark.parametrize("p", range(1, 7))
def test_the_checker_accepts_what_we_make(make, p):
    for m in range(1, 10):
        check_program(make(p, m), p, m)


@pytest.mark.parametrize("make", [one_f_one_b, forward_only])
@pytest.mark.parametrize(("p", "m"), [(0, 4), (2, 0), (-1, 1)])
def test_counts_below_one(make, p, m):
    text = f"a schedule needs at least one stage and one micro-batch: got num_stages={p}, num_microbatches={m}."
    with pytest.raises(ScheduleError, match=re.escape(text)):
        make(p, m)
