import re
from textwrap import dedent

import pytest
from schedule.oracle import every_schedule, makespan

from hybridpp.errors import ScheduleError
from hybridpp.schedule import (
    ActionKind,
    fill_weight_gradients,
    forward_only,
    gpipe,
    one_f_one_b,
    peak_activations,
    render,
)


def in_one(programs):
    """Programs whose backwards are one action each, where they began."""
    return tuple(
        tuple(
            action if action.kind is ActionKind.FORWARD else action._replace(kind=ActionKind.BACKWARD)
            for action in row
            if action.kind != "W"
        )
        for row in programs
    )


def test_weight_gradients_go_where_a_rank_would_idle():
    assert render(fill_weight_gradients(one_f_one_b(2, 3), limits=[2, 2])) == dedent("""\
        rank 0 | 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
        rank 1 | 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """)


def test_a_weight_gradient_precedes_a_forward_beyond_the_activation_limit():
    assert render(fill_weight_gradients(one_f_one_b(2, 3), limits=[2, 1])) == dedent("""\
        rank 0 | 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
        rank 1 | 1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2
    """)


def test_the_first_backwards_stay_whole_if_asked():
    assert render(fill_weight_gradients(one_f_one_b(2, 3), limits=[2, 2], num_unsplit=[3, 1])) == dedent("""\
        rank 0 | 0F0 0F1 0B0 0F2 0B1 0B2
        rank 1 | 1F0 1B0 1F1 1I1 1W1 1F2 1I2 1W2
    """)


@pytest.mark.parametrize("spare", [0, 1, 3])
def test_the_order_and_the_limits_are_kept_and_nothing_takes_longer(spare):
    for name, programs in every_schedule(ranks=(1, 2, 4), microbatches=(1, 4, 7), chunks=(1, 2)):
        limits = [peak + spare for peak in peak_activations(in_one(programs))]
        filled = fill_weight_gradients(programs, limits)
        assert in_one(filled) == in_one(programs), name
        assert all(peak <= limit for peak, limit in zip(peak_activations(filled), limits, strict=True)), name
        assert makespan(filled) <= makespan(in_one(programs)), name


def test_forwards_alone_stay_as_they_are():
    programs = forward_only((0, 1), 3)
    assert fill_weight_gradients(programs, [3, 3]) == programs


def test_a_limit_that_is_too_low():
    text = (
        "rank 0 cannot hold fewer activations than without splitting: got a limit of 3, and it holds 4. Use 4 or more."
    )
    with pytest.raises(ScheduleError, match=f"^{re.escape(text)}$"):
        fill_weight_gradients(gpipe(2, 4), [3, 4])


@pytest.mark.parametrize(("limits", "num_unsplit", "what"), [([2], None, "limits"), ([2, 2], [1], "num_unsplit")])
def test_not_one_number_per_rank(limits, num_unsplit, what):
    with pytest.raises(ScheduleError, match=re.escape(f"{what} needs one number per rank: got 1 for 2 ranks.")):
        fill_weight_gradients(one_f_one_b(2, 3), limits, num_unsplit)


def test_programs_that_do_not_run():
    programs = one_f_one_b(2, 3)
    with pytest.raises(ScheduleError, match=re.escape("1F0 is missing. Add it to rank 1.")):
        fill_weight_gradients((programs[0], programs[1][1:]), [2, 2])
