import re
from textwrap import dedent

import pytest

from hybridpp.errors import ScheduleError
from hybridpp.schedule import Kind, check_program, gpipe, lower, peak_in_flight, render


def test_gpipe_with_two_ranks_two_chunks_and_two_microbatches():
    assert render(gpipe(2, 2, 2)) == dedent("""\
        rank 0 | 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        rank 1 | 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
    """)


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
@pytest.mark.parametrize("num_microbatches", [1, 2, 5])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_gpipe_runs_to_its_end_and_holds_every_activation(num_ranks, num_microbatches, num_chunks):
    programs = gpipe(num_ranks, num_microbatches, num_chunks)
    check_program(programs, num_ranks * num_chunks, num_microbatches)
    assert all(peak_in_flight(row) == num_microbatches * num_chunks for row in programs)
    forward = gpipe(num_ranks, num_microbatches, num_chunks, forward_only=True)
    check_program(forward, num_ranks * num_chunks, num_microbatches)
    assert all(action.kind is Kind.FORWARD for row in forward for action in row)


def test_stages_on_one_rank_hand_over_without_a_message():
    (row,) = lower(gpipe(1, 2, 3))
    assert {action.kind for action in row} == {Kind.FORWARD, Kind.BACKWARD, Kind.REDUCE_GRADIENTS}


def test_counts_below_one():
    text = (
        "a schedule needs at least one rank, one micro-batch and one chunk: "
        "got num_ranks=2, num_microbatches=0, num_chunks=1."
    )
    with pytest.raises(ScheduleError, match=f"^{re.escape(text)}$"):
        gpipe(2, 0)
