import pytest
import torch
from torch import nn

from hybridpp.config import Precision
from hybridpp.precision import MasterWeights, ReplicatedTarget, master_weights, working_dtype


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
    formats, copy = [], master_weights.foreach_copy_

    def noted(targets, sources):
        formats.append({target.dtype for target in targets})
        copy(targets, sources)

    monkeypatch.setattr(master_weights, "foreach_copy_", noted)
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
