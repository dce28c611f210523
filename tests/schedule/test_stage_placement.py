import re

import pytest

from hybridpp.errors import ScheduleError
from hybridpp.schedule import looped, parse_action, placement, v_shaped


def test_stages_in_a_loop_and_in_a_v():
    assert looped(3) == (0, 1, 2)
    assert looped(2, 3) == (0, 1, 0, 1, 0, 1)
    assert v_shaped(3) == (0, 1, 2, 2, 1, 0)


def test_the_placement_is_read_from_the_actions():
    programs = tuple(tuple(map(parse_action, row.split())) for row in ("1F0 0F0", "", "2F0"))
    assert placement(programs) == (0, 0, 2)
    assert placement(((), ())) == ()


def test_a_stage_that_is_nowhere():
    with pytest.raises(
        ScheduleError, match=re.escape("stage 1 is on no rank, although stage 2 is. Add its actions to one rank.")
    ):
        placement(((parse_action("0F0"), parse_action("2F0")),))
