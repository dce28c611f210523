"""What all settings have in common: types of numbers and switches, and no change after construction."""

import math
from dataclasses import FrozenInstanceError, fields, is_dataclass

import numpy
import pytest
from covering import one_test_for
from refusals import refused

from hybridpp import config as settings_module
from hybridpp.config import (
    LossScaleConfig,
    OptimizerConfig,
    ParallelConfig,
    PipelineConfig,
    ZeroConfig,
    require_bools,
)

NUMBERS = [
    (cls, field.name)
    for cls in (ParallelConfig, ZeroConfig, OptimizerConfig, LossScaleConfig)
    for field in fields(cls)
    if field.type in (int, float) and field.name not in ("tp_size", "pp_size")
]
WHOLE_NUMBERS = [
    (ParallelConfig, "check_weights_every"),
    (ZeroConfig, "zero_stage"),
    (LossScaleConfig, "growth_interval"),
    (LossScaleConfig, "hysteresis"),
]


@pytest.mark.parametrize(
    "config",
    [
        ParallelConfig(tp_size=1, pp_size=1),
        ZeroConfig(),
        PipelineConfig(microbatch_size=1),
        LossScaleConfig(initial_scale=1.0, min_scale=1.0, max_scale=1.0),
        OptimizerConfig(),
    ],
    ids=lambda config: type(config).__name__,
)
def test_settings_at_the_edge_are_taken_and_then_frozen(config):
    name = next(iter(vars(config)))
    with pytest.raises(FrozenInstanceError):
        setattr(config, name, 2)


@one_test_for("cls, name, value", [(*one, value) for one in NUMBERS for value in ("1.0", None, True, math.nan, [1])])
def test_a_number_is_no_text_bool_or_nan(cls, name, value):
    what = "an integer" if (cls, name) in WHOLE_NUMBERS else "a number"
    with refused(f"{name} must be {what}: got {name}={value!r}. Pass {what}, or leave it out."):
        cls(**{name: value})


@pytest.mark.parametrize(("cls", "name"), WHOLE_NUMBERS)
def test_a_whole_number_is_no_fraction(cls, name):
    with refused(f"{name} must be an integer: got {name}=1.5. Pass an integer, or leave it out."):
        cls(**{name: 1.5})


def test_numbers_of_other_types_are_taken():
    assert OptimizerConfig(max_norm=1).max_norm == 1
    assert OptimizerConfig(max_norm=numpy.float32(0.5)).max_norm == 0.5
    assert LossScaleConfig(growth_interval=numpy.int64(7)).growth_interval == 7


NEEDED = {ParallelConfig: {"tp_size": 2, "pp_size": 1}, PipelineConfig: {"num_microbatches": 1}}
SWITCHES = [
    (cls, field.name)
    for cls in vars(settings_module).values()
    if is_dataclass(cls)
    for field in fields(cls)
    # compile_blocks takes a dict, too.
    if isinstance(field.default, bool) and field.name != "compile_blocks"
]


def test_there_are_switches():
    assert {name for _, name in SWITCHES} >= {"enable_sequence_parallelism", "fp32_losses"}


@one_test_for(
    "cls, name, value", [(*one, value) for one in SWITCHES for value in ("yes", "False", "", 1, 0, None, [True])]
)
def test_a_switch_is_true_or_false(cls, name, value):
    with refused(f"{name} must be True or False: got {name}={value!r}. Pass a bool."):
        cls(**NEEDED.get(cls, {}), **{name: value})
    for right in (True, False):
        assert getattr(cls(**NEEDED.get(cls, {}), **{name: right}), name) is right


def test_switches_are_checked_in_order():
    require_bools(first=True, second=False)
    with refused("second must be True or False: got second='no'. Pass a bool."):
        require_bools(first=True, second="no", third="no")
