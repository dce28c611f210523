import re

import pytest
from covering import one_test_for
from schedule.oracle import SIZES, makespan

from hybridpp.errors import ScheduleError
from hybridpp.schedule import (
    Offsets,
    check_program,
    peak_activations,
    placement,
    v_from_offsets,
    v_half,
    v_min,
    v_shaped,
)

LARGER = [(5, 20), (6, 24), (7, 30), (9, 9), (12, 13), (12, 40), (16, 33)]


@one_test_for(("p", "m"), [*SIZES, *LARGER])
def test_v_min_holds_and_idles_as_its_docstring_says(p, m):
    programs = v_min(p, m)
    check_program(programs, 2 * p, m)
    assert placement(programs) == v_shaped(p)
    assert max(peak_activations(programs)) == min(2 * m, 2 * -(-(p + 2) // 3))
    assert makespan(programs) - 6 * m <= 4 * p - 3


@one_test_for(("p", "m"), [*SIZES, *LARGER])
def test_v_half_holds_and_idles_as_its_docstring_says(p, m):
    programs = v_half(p, m)
    check_program(programs, 2 * p, m)
    assert placement(programs) == v_shaped(p)
    assert max(peak_activations(programs)) <= min(2 * m, p + 3)
    if m >= p:
        assert makespan(programs) - 6 * m <= 3 * p - 3


@pytest.mark.parametrize(
    "offsets", [Offsets(1, 1, 1, 1), Offsets(1, 2, 1, 2), Offsets(3, 3, 3, 3), Offsets(4, 1, 2, 3)]
)
def test_ranks_do_not_idle_in_the_steady_state(offsets):
    few, many = (makespan(v_from_offsets(5, m, offsets)) for m in (20, 60))
    assert many - few == 6 * 40


def test_an_offset_of_zero():
    with pytest.raises(ScheduleError, match=re.escape("got num_ranks=2, num_microbatches=3, down=1, up=0")):
        v_from_offsets(2, 3, Offsets(1, 0, 1, 1))
