import re
from textwrap import dedent

import pytest
from schedule.oracle import SIZES_WITH_CHUNKS, idle_share

from hybridpp.errors import ScheduleError
from hybridpp.schedule import ActionKind, check_program, gpipe, lower, peak_activations, render


def test_gpipe_with_two_ranks_two_chunks_and_two_microbatches():
    assert render(gpipe(2, 2, 2)) == dedent("""\
        rank 0 | 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        rank 1 | 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
    """)


@pytest.mark.covering("p m", "p v")
@pytest.mark.parametrize(("p", "m", "v"), SIZES_WITH_CHUNKS)
def test_gpipe_holds_every_activation_and_idles_as_its_docstring_says(p, m, v):
    programs = gpipe(p, m, v)
    check_program(programs, p * v, m)
    assert peak_activations(programs) == (m * v,) * p
    assert idle_share(programs) == pytest.approx(1 - m * v / (m + p - 1 + (v - 1) * max(m, p)))


def test_stages_on_one_rank_hand_over_without_a_message():
    (row,) = lower(gpipe(1, 2, 3))
    assert {action.kind for action in row} == {ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.REDUCE_GRADIENTS}


def test_counts_below_one():
    text = "a schedule needs every count to be at least 1: got num_ranks=2, num_microbatches=0, num_chunks=1."
    with pytest.raises(ScheduleError, match=f"^{re.escape(text)}$"):
        gpipe(2, 0)
