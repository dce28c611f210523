import pytest
import torch
from torch import nn

from hybridpp.config import LossScaleConfig, Precision
from hybridpp.precision import (
    LossScale,
    LossScaler,
    MasterWeights,
    ReplicatedTarget,
    mixed_precision,
    update_loss_scale,
    working_dtype,
)

CLEAN, OVERFLOW = False, True


def model():
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    made[0].bias.requires_grad_(False)
    return made


def test_a_master_that_is_set_is_not_taken_back_from_its_rounded_weight():
    net = model()
    weights = MasterWeights(dict(net.named_parameters()))
    net.bfloat16()
    value = torch.full((3, 3), 1.001)
    weights.set("0.weight", value)
    weights.copy_from_model()
    assert torch.equal(weights.masters["0.weight"], value)
    assert torch.equal(net[0].weight, value.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masters_keep_what_the_working_weights_round(dtype):
    net = model()
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    weights = MasterWeights(dict(net.named_parameters()))
    net.to(dtype)
    for name, parameter in net.named_parameters():
        master = weights.masters[name]
        assert torch.equal(master, before[name])
        assert (master.dtype, master.is_leaf, master.requires_grad) == (torch.float32, True, parameter.requires_grad)
    step = 2.0**-13  # too small for either format beside a weight of order one
    with torch.no_grad():
        for master in weights.masters.values():
            master += step
    weights.copy_to_model()
    for name, parameter in net.named_parameters():
        assert torch.equal(weights.masters[name], before[name] + step)
        assert torch.equal(parameter, (before[name] + step).to(dtype))


def test_weights_of_several_formats_are_rounded_one_format_at_a_time(monkeypatch):
    """A model with modules in fp32; torch's CUDA kernel wants targets of one format."""
    net = model()
    weights = MasterWeights(dict(net.named_parameters()))
    net[0].half()
    formats, copy = [], mixed_precision.foreach_copy_

    def noted(targets, sources):
        formats.append({target.dtype for target in targets})
        copy(targets, sources)

    monkeypatch.setattr(mixed_precision, "foreach_copy_", noted)
    with torch.no_grad():
        for master in weights.masters.values():
            master.add_(0.125)
    weights.copy_to_model()
    assert formats == [{torch.float16}, {torch.float32}]
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, weights.masters[name].to(parameter.dtype))


def test_no_masters_is_fine():
    weights = MasterWeights({})
    weights.copy_to_model()
    assert weights.masters == {}


def test_a_target_lends_gradients_to_masters_and_takes_them_back():
    net = model()
    masters = MasterWeights({"0.weight": net[0].weight})
    net[0].half()
    trainable = {name: parameter for name, parameter in net.named_parameters() if parameter.requires_grad}
    target = ReplicatedTarget(trainable, masters)
    assert target.tensors["0.weight"] is masters.masters["0.weight"]
    assert target.tensors["1.weight"] is net[1].weight
    gradients = {name: torch.ones(tensor.shape) for name, tensor in target.tensors.items()}
    with target.lent(gradients, unused={"1.bias"}):
        seen = {name: tensor.grad for name, tensor in target.tensors.items()}
        assert net[0].weight.grad is None
    assert seen["0.weight"] is gradients["0.weight"]
    assert seen["1.weight"] is gradients["1.weight"]
    assert seen["1.bias"] is None
    assert all(tensor.grad is None for tensor in target.tensors.values())


@pytest.mark.parametrize(
    ("precision", "made_in", "expected"),
    [
        (Precision.FP16, torch.float32, torch.float16),
        (Precision.BF16, torch.float32, torch.bfloat16),
        (Precision.BF16, torch.float16, torch.bfloat16),
        (Precision.FP32, torch.float32, None),
        (Precision.FP32, torch.float16, torch.float32),
        (Precision.FP32, torch.bfloat16, torch.float32),
        (Precision.FP32, torch.float64, None),
    ],
)
def test_the_format_that_a_model_computes_in(precision, made_in, expected):
    assert working_dtype(model().to(made_in), precision) is expected


def test_a_model_with_some_half_precision_buffers_is_widened():
    net = model()
    net[1].running_mean = net[1].running_mean.bfloat16()
    assert working_dtype(net, Precision.FP32) is torch.float32


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
