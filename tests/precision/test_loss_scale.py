import pytest

from hybridpp.config import LossScaleConfig
from hybridpp.precision import LossScale, LossScaler, update_loss_scale

CLEAN, OVERFLOW = False, True


def scales(steps, **settings):
    """The scale before each step and after the last one."""
    config = LossScaleConfig(**{"initial_scale": 8.0, "growth_interval": 2, **settings})
    state = LossScale(config.initial_scale)
    seen = [state.scale]
    for overflow in steps:
        state = update_loss_scale(state, overflow, config)
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
        # Hysteresis lets the first ones pass; used up, every overflow lowers the scale.
        ([CLEAN, *[OVERFLOW] * 5], {"hysteresis": 2}, [8, 8, 8, 4, 2, 1, 1]),
        # A clean step does not restore it, growing does.
        ([CLEAN, OVERFLOW] * 3, {"hysteresis": 2, "growth_interval": 9}, [8, 8, 8, 8, 4, 4, 2]),
        ([CLEAN, OVERFLOW, CLEAN, CLEAN, OVERFLOW, OVERFLOW], {"hysteresis": 2}, [8, 8, 8, 8, 16, 16, 8]),
        # Until the scale has worked once, it is only looked for: every overflow lowers it.
        ([OVERFLOW] * 2 + [CLEAN, OVERFLOW], {"hysteresis": 2}, [8, 4, 2, 2, 2]),
        ([OVERFLOW, CLEAN, *[OVERFLOW] * 2], {"hysteresis": 3, "growth_interval": 9}, [8, 4, 4, 4, 4]),
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
        (CLEAN, LossScale(4.0, clean_steps=1, overflows=2, settled=True)),
        (OVERFLOW, LossScale(2.0, overflows=3, settled=True)),
        (OVERFLOW, LossScale(1.0, overflows=4, settled=True)),
    ]:
        state = update_loss_scale(state, overflow, config)
        assert state == expected


def test_repeated_overflows_lower_the_scale_as_in_megatron_and_colossalai():
    """Eight in a row from 2**16 with hysteresis 2: one passes, seven halve it."""
    steps = [CLEAN, *[OVERFLOW] * 8]
    assert scales(steps, initial_scale=2.0**16, hysteresis=2, growth_interval=1000)[-1] == 512


def test_a_scaler_counts_skipped_steps_and_returns_the_state_before():
    scaler = LossScaler(LossScaleConfig(initial_scale=8.0, growth_interval=1), scales=True)
    assert scaler.update(OVERFLOW) == LossScale(8.0)
    assert (scaler.state.scale, scaler.skipped_steps, scaler.last_step_skipped) == (4.0, 1, True)
    assert scaler.update(CLEAN) == LossScale(4.0)
    assert (scaler.state.scale, scaler.skipped_steps, scaler.last_step_skipped) == (8.0, 1, False)


def test_a_scaler_without_a_scale_only_counts():
    scaler = LossScaler(LossScaleConfig(initial_scale=8.0), scales=False)
    scaler.update(OVERFLOW)
    assert (scaler.state, scaler.skipped_steps) == (LossScale(1.0), 1)
