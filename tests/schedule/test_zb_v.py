import re
from textwrap import dedent

import pytest
from covering import one_test_for
from schedule.oracle import SIZES, idle_share, makespan

from hybridpp.errors import ScheduleError
from hybridpp.schedule import check_program, peak_activations, placement, render_grid, v_shaped, zb_v


def test_zb_v_with_two_ranks_and_three_microbatches():
    assert render_grid(zb_v(2, 3)) == dedent("""\
        rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 3I1 0W0 3W1 3F2 3I2 0I1 3W2 0I2 0W1 0W2 .
        rank 1 | .   1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2
    """)


@one_test_for(("p", "m"), [*SIZES, (12, 13), (12, 37)])
def test_zb_v_holds_and_idles_as_its_docstring_says(p, m):
    programs = zb_v(p, m)
    check_program(programs, 2 * p, m)
    assert placement(programs) == v_shaped(p)
    assert max(peak_activations(programs)) == min(2 * m, 2 * p)
    assert makespan(programs) == p - 1 + max(6 * m, 4 * m + 2 * p, 2 * m + 3 * p)
    if m >= p:
        assert idle_share(programs) == pytest.approx((p - 1) / (6 * m + p - 1))


def test_counts_below_one():
    text = "a schedule needs every count to be at least 1: got num_ranks=3, num_microbatches=0."
    with pytest.raises(ScheduleError, match=f"^{re.escape(text)}$"):
        zb_v(3, 0)
