import re
import warnings
from textwrap import dedent

import pytest

from hybridpp.errors import ScheduleError
from hybridpp.schedule import (
    Action,
    ActionKind,
    forward_only,
    lower,
    one_f_one_b,
    parse_action,
    render,
    render_grid,
    with_unshards,
)

SPLIT = (
    (
        Action(0, ActionKind.FORWARD, 0),
        Action(0, ActionKind.INPUT_GRADIENT, 0),
        Action(0, ActionKind.WEIGHT_GRADIENT, 0),
    ),
)
LOWERED = [lower(programs) for programs in (one_f_one_b(4, 11), forward_only((0, 1, 2), 2), one_f_one_b(12, 3), SPLIT)]
LOWERED.append(tuple(with_unshards(program, 1) for program in LOWERED[0]))


def actions():
    return sorted({str(action) for programs in LOWERED for row in programs for action in row})


@pytest.mark.parametrize("programs", LOWERED)
def test_text_read_back_is_the_same_schedule(programs):
    rows = [line.split(" | ")[1].split() for line in render(programs).splitlines()]
    assert tuple(tuple(map(parse_action, row)) for row in rows) == programs


def test_torch_reads_our_text_and_writes_the_same():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.pipelining.schedules import _Action

    kinds = {parse_action(text).kind for text in actions()}
    assert kinds == set(ActionKind)
    for text in actions():
        theirs, ours = _Action.from_str(text), parse_action(text)
        assert (theirs.stage_index, theirs.microbatch_index) == (ours.stage, ours.microbatch)
        assert theirs.computation_type.value == ours.kind
        assert str(theirs) == text


@pytest.mark.parametrize("text", ["", "F0", "0X0", "0f0", "-1F0", "0F0 ", "0F0 1F0", "0SEND_0", "0F-1"])
def test_what_is_no_action(text):
    message = (
        "an action is written like 2F0 (stage, one of F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B, REDUCE_GRAD, "
        f"UNSHARD, RESHARD, micro-batch): got {text!r}."
    )
    with pytest.raises(ScheduleError, match=f"^{re.escape(message)}$"):
        parse_action(text)


def test_actions_are_plain_values():
    assert Action(2, ActionKind.FORWARD, 0) == (2, "F", 0) == parse_action("2F0")
    assert str(Action(2, ActionKind.REDUCE_GRADIENTS)) == "2REDUCE_GRAD"


def test_a_grid_shows_when_ranks_idle():
    assert render_grid(one_f_one_b(2, 2)) == dedent("""\
        rank 0 | 0F0 0F1 .   .   0B0 --- .   0B1 ---
        rank 1 | .   1F0 1B0 --- 1F1 1B1 --- .   .
    """)


def test_the_columns_of_a_grid_are_as_wide_as_its_longest_cell():
    programs = ((parse_action("0F0"), parse_action("0F10")), (parse_action("1F10"),))
    assert render_grid(programs) == dedent("""\
        rank 0 | 0F0  0F10 .
        rank 1 | .    .    1F10
    """)
    assert render_grid(one_f_one_b(11, 1)).splitlines()[9].startswith("rank 9  | .    ")


def test_a_grid_of_nothing():
    assert render_grid(((), ())) == "rank 0 |\nrank 1 |\n"
