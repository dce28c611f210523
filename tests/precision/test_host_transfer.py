"""Gradients and weights in host memory; on the CPU nothing is copied. On a device: tests/scripts/on_device.py."""

import torch
from torch import nn

from hybridpp.precision import MasterWeights, ReplicatedTarget


def test_gradients_of_host_memory_are_lent_themselves():
    net = nn.Linear(3, 2)
    parameters = dict(net.named_parameters())
    masters = MasterWeights(parameters, on_host=["weight"], are_copies=True)
    masters.masters.pop("bias")
    target = ReplicatedTarget(parameters, masters)
    gradients = {name: torch.ones_like(parameter) for name, parameter in parameters.items()}
    assert not target.copies_gradients
    assert target.tensors["weight"] is not net.weight
    assert target.tensors["bias"] is net.bias
    with target.lent(gradients, ()):
        target.fetch()
        assert target.tensors["weight"].grad is gradients["weight"]
        with torch.no_grad():
            target.tensors["weight"].sub_(target.tensors["weight"].grad)
    assert target.tensors["weight"].grad is None
    expected = target.tensors["weight"].detach().clone()
    assert not torch.equal(net.weight, expected)
    target.push()
    assert torch.equal(net.weight, expected)


def test_masters_keep_wide_formats():
    parameters = {"half": nn.Parameter(torch.ones(2).bfloat16()), "wide": nn.Parameter(torch.ones(2).double())}
    masters = MasterWeights(parameters, on_host=parameters).masters
    assert {name: master.dtype for name, master in masters.items()} == {"half": torch.float32, "wide": torch.float64}


def test_weights_without_values_have_masters_in_host_memory():
    parameters = {"weight": nn.Parameter(torch.ones(4, 3, device="meta").t())}
    (master,) = MasterWeights(parameters, on_host=parameters).masters.values()
    assert (master.device.type, master.shape, master.stride()) == ("cpu", (3, 4), (1, 3))
