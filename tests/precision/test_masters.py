import pytest
import torch
from torch import nn

from hybridpp.config import Precision
from hybridpp.precision import MasterWeights, working_dtype


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
    weights.from_working()
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
    weights.to_working()
    for name, parameter in net.named_parameters():
        assert torch.equal(weights.masters[name], before[name] + step)
        assert torch.equal(parameter, (before[name] + step).to(dtype))


def test_weights_of_several_formats_are_rounded_one_format_at_a_time(monkeypatch):
    """A model with modules in fp32; torch's CUDA kernel wants targets of one format."""
    net = model()
    weights = MasterWeights(dict(net.named_parameters()))
    net[0].half()
    formats, copy = [], torch._foreach_copy_

    def noted(targets, sources):
        formats.append({target.dtype for target in targets})
        copy(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", noted)
    with torch.no_grad():
        for master in weights.masters.values():
            master.add_(0.125)
    weights.to_working()
    assert formats == [{torch.float16}, {torch.float32}]
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, weights.masters[name].to(parameter.dtype))


def test_no_masters_is_fine():
    weights = MasterWeights({})
    weights.to_working()
    assert weights.masters == {}


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
