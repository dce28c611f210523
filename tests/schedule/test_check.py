import re

import pytest

from hybridpp.errors import ScheduleError
from hybridpp.schedule import check_program, parse_action


def programs(*rows):
    return tuple(tuple(parse_action(text) for text in row.split()) for row in rows)


GOOD = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (("0F0 0F1 0B0 0B1", "1F0 1B0 1F1"), "1B1 is missing. Add it to stage 1's rank."),
        (("0F0 0B0 0B1", "1F0 1B0 1B1"), "0F1 is missing. Add it to stage 0's rank."),
        (("", ""), "0F0 is missing. Add it to stage 0's rank."),
        (("0F0 0F1 0F0 0B0 0B1", GOOD[1]), "0F0 (rank 0, place 0) stands 2 times. Keep one."),
        (
            (GOOD[0], "1F0 1B0 1F1 1B1 2F0"),
            "2F0 (rank 1, place 4) is no compute action of 2 stages and 2 micro-batches.",
        ),
        (("0F0 0F2 0B0 0B2", GOOD[1]), "0F2 (rank 0, place 1) is no compute action of 2 stages and 2 micro-batches."),
        (("0F0 0SEND_F0 0F1", "1F0 1F1"), "0SEND_F0 (rank 0, place 1) is no compute action of 2 stages"),
        (("0F 0F1", "1F0 1F1"), "0F (rank 0, place 0) is no compute action of 2 stages"),
        (
            ("0F0 0F1 0B0 1F1", "1F0 1B0 1B1 0B1"),
            "1F0 (rank 1, place 0) puts stage 1 on a second rank; it is on rank 0 already.",
        ),
        # Each waits for the other: stage 0's second forward for its own backward, which waits for stage 1's second.
        (
            ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
            "0B0 (rank 0, place 1) waits for ever for 1B0. Move it behind what it needs.",
        ),
        (("0B0 0F0 0F1 0B1", GOOD[1]), "0B0 (rank 0, place 0) waits for ever for 0F0, 1B0."),
        ((GOOD[0], "1B0 1F0 1F1 1B1"), "0B0 (rank 0, place 2) waits for ever for 1B0."),
        # Runs to its end, but each micro-batch would get the other's activations.
        (
            ("0F0 0F1 0B1 0B0", "1F1 1B1 1F0 1B0"),
            "rank 1 takes the result of 0F1 where rank 0 sends that of 0F0. Let both ranks keep one order.",
        ),
        (
            ("0F0 0F1 0B0 0B1", "1F0 1F1 1B1 1B0"),
            "rank 0 takes the result of 1B0 where rank 1 sends that of 1B1. Let both ranks keep one order.",
        ),
    ],
)
def test_the_first_bad_cell_is_named(rows, text):
    with pytest.raises(ScheduleError, match=re.escape(text)):
        check_program(programs(*rows), num_stages=2, num_microbatches=2)


@pytest.mark.parametrize(
    "rows",
    [
        GOOD,
        ("0F0 0F1 1F0 1B0 1F1 0B0 1B1 0B1",),  # both stages on one rank
        ("1F0 1B0 1F1 1B1", "0F0 0F1 0B0 0B1"),  # the ranks in another order than the stages
        ("0F0 0F1", "1F0 1F1"),
    ],
)
def test_what_runs_to_its_end_is_accepted(rows):
    check_program(programs(*rows), num_stages=2, num_microbatches=2)
