import pytest

from hybridpp.config import LossScaleConfig
from hybridpp.precision import LossScale, after_step

CLEAN, OVERFLOW = False, True


def scales(steps, **settings):
    """The scale before each step and after the last one."""
    config = LossScaleConfig(**{"initial_scale": 8.0, "growth_interval": 2, **settings})
    state = LossScale(config.initial_scale)
    seen = [state.scale]
    for overflow in steps:
        state = after_step(state, overflow, config)
        seen.append(state.scale)
    return seen


@pytest.mark.parametrize(
    ("steps", "settings", "expected"),
    [
        # Grows after every growth_interval clean steps.
        ([CLEAN] * 5, {}, [8, 8, 16, 16, 32, 32]),
        ([CLEAN] * 3, {"growth_interval": 1, "growth_factor": 4.0}, [8, 32, 128, 512]),
        # An overflow lowers it, and the count of clean steps starts anew.
        ([CLEAN, OVERFLOW, CLEAN, CLEAN], {}, [8, 8, 4, 4, 8]),
        ([OVERFLOW] * 3, {"backoff_factor": 0.25}, [8, 2, 1, 1]),
        # Only as many overflows in a row as hysteresis says; then it counts anew.
        ([CLEAN, *[OVERFLOW] * 5], {"hysteresis": 2}, [8, 8, 8, 4, 4, 2, 2]),
        # Until the scale has worked once, it is only looked for: every overflow lowers it.
        ([OVERFLOW] * 2 + [CLEAN, OVERFLOW], {"hysteresis": 2}, [8, 4, 2, 2, 2]),
        ([CLEAN, OVERFLOW, CLEAN, OVERFLOW, OVERFLOW], {"hysteresis": 2, "growth_interval": 9}, [8, 8, 8, 8, 8, 4]),
        # An overflow that is let pass still ends a run of clean steps.
        ([CLEAN, OVERFLOW, CLEAN, CLEAN], {"hysteresis": 2}, [8, 8, 8, 8, 16]),
        # Never outside the limits, also where a factor would step over one.
        ([OVERFLOW] * 4, {"min_scale": 3.0}, [8, 4, 3, 3, 3]),
        ([CLEAN] * 4, {"growth_interval": 1, "max_scale": 20.0}, [8, 16, 20, 20, 20]),
    ],
)
def test_the_scale_moves(steps, settings, expected):
    assert scales(steps, **settings) == expected


def test_the_state_says_what_led_to_it():
    config = LossScaleConfig(initial_scale=8.0, hysteresis=3, growth_interval=10)
    state = LossScale(8.0)
    for overflow, expected in [
        (OVERFLOW, LossScale(4.0)),
        (CLEAN, LossScale(4.0, clean_steps=1, settled=True)),
        (CLEAN, LossScale(4.0, clean_steps=2, settled=True)),
        (OVERFLOW, LossScale(4.0, overflows=1, settled=True)),
        (OVERFLOW, LossScale(4.0, overflows=2, settled=True)),
        (OVERFLOW, LossScale(2.0, settled=True)),
    ]:
        state = after_step(state, overflow, config)
        assert state == expected
