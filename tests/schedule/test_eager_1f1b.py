import re

import pytest
from covering import one_test_for
from schedule.oracle import SIZES, makespan

from hybridpp.errors import ScheduleError
from hybridpp.schedule import ActionKind, check_program, eager_1f1b, looped, peak_activations, placement, zb_h1


@one_test_for(("p", "m"), SIZES)
def test_it_holds_and_idles_as_its_docstring_says(p, m):
    programs = eager_1f1b(p, m)
    check_program(programs, p, m)
    assert placement(programs) == looped(p, 1)
    assert max(peak_activations(programs)) == min(m, 2 * p - 1)
    assert makespan(programs) == makespan(zb_h1(p, m))
    split = [sum(action.kind is ActionKind.INPUT_GRADIENT for action in program) for program in programs]
    assert split == [0] + [min(m, 2 * (p - 1))] * (p - 1)


def test_counts_below_one():
    with pytest.raises(ScheduleError, match=re.escape("needs every count to be at least 1: got num_ranks=0")):
        eager_1f1b(0, 3)
