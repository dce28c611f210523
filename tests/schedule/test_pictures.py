"""The pictures in docstrings are what the functions give."""

from textwrap import indent

import pytest

from hybridpp.schedule import (
    eager_1f1b,
    forward_only,
    gpipe,
    interleaved,
    interleaved_zero_bubble,
    one_f_one_b,
    render,
    render_grid,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zb_v,
)


@pytest.mark.parametrize(
    ("make", "arguments", "draw"),
    [
        (gpipe, (2, 2, 2), render_grid),
        (one_f_one_b, (3, 4), render_grid),
        (eager_1f1b, (3, 6), render_grid),
        (interleaved, (2, 4, 2), render),
        (zb_h1, (3, 4), render_grid),
        (zb_h2, (3, 6), render_grid),
        (interleaved_zero_bubble, (2, 4, 2), render_grid),
        (zb_v, (3, 3), render_grid),
        (v_min, (2, 3), render_grid),
        (v_half, (2, 3), render_grid),
        (forward_only, ((0, 1, 1, 0), 3), render_grid),
    ],
)
def test_the_docstrings_picture_is_the_schedule(make, arguments, draw):
    assert indent(draw(make(*arguments)), " " * 8) in make.__doc__
