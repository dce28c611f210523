import re
from textwrap import dedent

import pytest
from covering import one_test_for
from schedule.oracle import SIZES, SIZES_WITH_CHUNKS, idle_share, makespan

from hybridpp.errors import ScheduleError
from hybridpp.schedule import (
    ActionKind,
    check_program,
    interleaved_zero_bubble,
    looped,
    one_f_one_b,
    peak_activations,
    placement,
    render_grid,
    zb_h1,
    zb_h2,
)
from hybridpp.schedule.dependencies import earliest_times


def test_zb_h1_with_two_ranks_and_three_microbatches():
    assert render_grid(zb_h1(2, 3)) == dedent("""\
        rank 0 | 0F0 0F1 .   0I0 0W0 0F2 0I1 0W1 0I2 0W2
        rank 1 | .   1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """)


@one_test_for(("p", "m"), SIZES)
def test_zb_h1_holds_and_idles_as_its_docstring_says(p, m):
    programs = zb_h1(p, m)
    check_program(programs, p, m)
    assert max(peak_activations(programs)) == min(m, p) == max(peak_activations(one_f_one_b(p, m)))
    assert makespan(programs) == 2 * m + max(m, p) + p - 1
    assert idle_share(programs) == pytest.approx(1 - 3 * m / (2 * m + max(m, p) + p - 1))
    if m >= p:
        assert idle_share(programs) == pytest.approx((p - 1) / (3 * m + p - 1))


@one_test_for(("p", "m"), SIZES)
def test_zb_h2_holds_and_idles_as_its_docstring_says(p, m):
    programs = zb_h2(p, m)
    check_program(programs, p, m)
    assert placement(programs) == looped(p, 1)
    assert max(peak_activations(programs)) == min(m, 2 * p - 1)
    assert makespan(programs) == makespan(zb_h1(p, m))
    split = [sum(action.kind is ActionKind.INPUT_GRADIENT for action in program) for program in programs]
    assert split == [0] + [m] * (p - 1)


@one_test_for(("p", "m"), SIZES)
def test_zb_h2_is_a_parallelogram(p, m):
    programs, times = zb_h2(p, m), earliest_times(zb_h2(p, m))
    for rank, program in enumerate(programs):
        assert times[program[0]].start == rank
        if m >= 2 * p - 1:
            assert times[program[-1]].end == rank + 3 * m


@pytest.mark.covering("p m", "p v")
@pytest.mark.parametrize(("p", "m", "v"), SIZES_WITH_CHUNKS)
def test_interleaved_zero_bubble_holds_and_idles_as_its_docstring_says(p, m, v):
    programs = interleaved_zero_bubble(p, m, v)
    check_program(programs, p * v, m)
    assert placement(programs) == looped(p, v)
    if v == 1:
        assert programs == zb_h1(p, m)
    else:
        g = -(-m // max(1, m // p))
        assert max(peak_activations(programs)) == min(m * v, (v - 1) * g + 2 * p - 1)
    assert makespan(programs) == p - 1 + max(3 * m * v, 2 * m * v + p * v, 2 * m + 2 * p * v - p)
    if m >= p:
        assert idle_share(programs) == pytest.approx((p - 1) / (3 * m * v + p - 1))


def test_counts_below_one():
    for make in (zb_h1, zb_h2, interleaved_zero_bubble):
        with pytest.raises(ScheduleError, match=re.escape("needs every count to be at least 1: got num_ranks=0")):
            make(0, 3)
