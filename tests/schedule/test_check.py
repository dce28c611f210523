import re

import pytest
from schedule.oracle import every_schedule

from hybridpp.errors import ScheduleError
from hybridpp.schedule import check_program, parse_action


def programs(*rows):
    return tuple(tuple(parse_action(text) for text in row.split()) for row in rows)


GOOD = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        # Cells that have no place in the schedule.
        (
            (GOOD[0], "1F0 1B0 1F1 1B1 2F0"),
            "2F0 (rank 1, position 4) is not a compute action of 2 stages and 2 micro-batches. Remove it.",
        ),
        (
            ("0F0 0F2 0B0 0B2", GOOD[1]),
            "0F2 (rank 0, position 1) is not a compute action of 2 stages and 2 micro-batches.",
        ),
        (("0F0 0SEND_F0 0F1", "1F0 1F1"), "0SEND_F0 (rank 0, position 1) is not a compute action of 2 stages"),
        (("0F 0F1", "1F0 1F1"), "0F (rank 0, position 0) is not a compute action of 2 stages"),
        (
            ("0F0 0F1 0F0 0B0 0B1", GOOD[1]),
            "0F0 (rank 0, position 2) is a duplicate of the one at rank 0, position 0. Keep one of them.",
        ),
        (
            ("0F0 0F1 0B0 1F1", "1F0 1B0 1B1 0B1"),
            "1F0 (rank 1, position 0) puts stage 1 on a second rank. Move it to rank 0, which already has the stage.",
        ),
        # Cells that are missing.
        (("0F0 0F1 0B0 0B1", "1F0 1B0 1F1"), "1B1 is missing. Add it to rank 1, or both 1I1 and 1W1."),
        (("0F0 0B0 0B1", "1F0 1B0 1B1"), "0F1 is missing. Add it to rank 0."),
        (("0F0 0F1", ""), "stage 1 of 2 is on no rank. Add its actions to one rank."),
        (("", ""), "a schedule needs at least one action: got none. Give each rank the forwards of its stages."),
        (
            ("0F0 0F1 0I0 0B1", GOOD[1]),
            "0I0 (rank 0, position 2) has no 0W0. Add 0W0 after it, or replace it by 0B0.",
        ),
        (
            ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1W1"),
            "1W1 (rank 1, position 3) has no 1I1. Add 1I1 before it, or replace it by 1B1.",
        ),
        (
            ("0F0 0F1 0B0 0W0 0B1", GOOD[1]),
            "0W0 (rank 0, position 3) is part of 0B0 (rank 0, position 2). Keep 0B0, or both 0I0 and 0W0.",
        ),
        (("0F0 0F1 0B0 0I0 0W0 0B1", GOOD[1]), "0I0 (rank 0, position 3) is part of 0B0 (rank 0, position 2)."),
        # Cells before what they need on their own rank.
        (
            ("0B0 0F0 0F1 0B1", GOOD[1]),
            "0B0 (rank 0, position 0) comes before 0F0 (rank 0, position 1), whose result it needs. Move it after 0F0.",
        ),
        (
            (GOOD[0], "1F0 1W0 1I0 1F1 1B1"),
            "1W0 (rank 1, position 1) comes before 1I0 (rank 1, position 2), whose result it needs. Move it after 1I0.",
        ),
        (
            ("0F0 1F0 0B0 1B0 0F1 1F1 1B1 0B1",),
            "0B0 (rank 0, position 2) comes before 1B0 (rank 0, position 3), whose result it needs. Move it after 1B0.",
        ),
        # Ranks that wait for each other.
        (
            ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
            "these actions deadlock; each waits for the next: 0B0 (rank 0, position 1) for 1B0 (rank 1, position 2), "
            "1F1 (rank 1, position 1) for 0F1 (rank 0, position 2). Move 1B0 before 1F1, or 0F1 before 0B0.",
        ),
    ],
)
def test_the_first_bad_cell_is_named(rows, text):
    with pytest.raises(ScheduleError, match=f"^{re.escape(text)}"):
        check_program(programs(*rows), num_stages=2, num_microbatches=2)


def test_of_a_deadlock_only_the_circle_is_told():
    """Rank 0 waits too, but for ranks that wait for each other without it."""
    rows = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1")
    text = (
        "these actions deadlock; each waits for the next: 1B0 (rank 1, position 1) for 2B0 (rank 2, position 2), "
        "2F1 (rank 2, position 1) for 1F1 (rank 1, position 2). Move 2B0 before 2F1, or 1F1 before 1B0."
    )
    with pytest.raises(ScheduleError, match=f"^{re.escape(text)}$"):
        check_program(programs(*rows))


@pytest.mark.parametrize(
    "rows",
    [
        GOOD,
        ("0F0 0F1 1F0 1B0 1F1 0B0 1B1 0B1",),  # both stages on one rank
        ("1F0 1B0 1F1 1B1", "0F0 0F1 0B0 0B1"),  # the ranks in another order than the stages
        ("0F0 0F1", "1F0 1F1"),
        ("0F0 0F1 0B0 0I1 0W1", "1F0 1I0 1F1 1W0 1B1"),  # some backwards whole, some in two parts
        ("0F0 0F1 0B1 0B0", "1F1 1B1 1F0 1B0"),  # each rank in an order of its own
        ("0F0 0F1 0B0 0B1", "1F0 1F1 1B1 1B0"),
        (*GOOD, ""),  # a rank with nothing to do
    ],
)
def test_what_runs_to_its_end_is_accepted(rows):
    check_program(programs(*rows), num_stages=2, num_microbatches=2)
    check_program(programs(*rows))


def test_counts_that_are_not_given_are_read_from_the_cells():
    check_program(programs("0F0 0F1"))
    with pytest.raises(ScheduleError, match=re.escape("0F0 is missing. Add it to rank 0.")):
        check_program(programs("0F1"))
    with pytest.raises(ScheduleError, match=re.escape("0F2 is missing. Add it to rank 0.")):
        check_program(programs("0F0 0F1"), num_microbatches=3)
    with pytest.raises(ScheduleError, match=re.escape("stage 1 of 2 is on no rank.")):
        check_program(programs("0F0 0F1"), num_stages=2)


def test_every_schedule_is_accepted():
    for _, made in every_schedule():
        check_program(made)
