"""What is made of weights alone is told from what samples are in."""

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from hybridpp.data_parallel.sources import GradientSource, Sources, source_of

X = torch.ones(2, 3)


class Passed(Function):
    @staticmethod
    def forward(ctx, *given):
        return given[0].view_as(given[0])

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Filled(Function):
    """Writes its result in a way that nobody can follow."""

    @staticmethod
    def forward(ctx, *given):
        return torch.empty(2, 3)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Noting(TorchFunctionMode):
    def __init__(self, sources):
        super().__init__()
        self.sources = sources

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.sources.note(args, kwargs or {}, result)
        return result


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))
        self.register_buffer("mask", torch.ones(2, 3))
        self.parts = {"scales": [torch.ones(3)]}


def written(net, x):
    made = torch.zeros(2, 3)
    made[0] = net.weight[0]
    made[1] = x[1]
    return made


def set_again(net, x):
    net.weight.data = net.weight.data + x
    return net.weight * 2


OF_WEIGHTS = {
    "factor": lambda net, x: net.weight * 2,
    "buffer": lambda net, x: net.weight * net.mask,
    "attribute": lambda net, x: net.weight * net.parts["scales"][0],
    "made here": lambda net, x: net.weight + torch.zeros(x.shape),
    "mask of itself": lambda net, x: net.weight * (net.weight.abs() > 0.5),
    "joined": lambda net, x: torch.cat([net.weight, net.weight]),
    "function": lambda net, x: Passed.apply(net.weight, net.mask),
    "function of what is made": lambda net, x: Passed.apply(Passed.apply(net.weight * 2, 1.0), None) * 1,
    "function that fills": lambda net, x: Filled.apply(net.weight, 2),
    "set again": set_again,
}
OF_SAMPLES = {
    "product": lambda net, x: net.weight * x,
    "layer": lambda net, x: nn.functional.linear(x, net.weight),
    "mean": lambda net, x: net.weight * x.mean().detach(),
    "later": lambda net, x: (net.weight * 2).exp() @ (x.T * 1),
    "joined": lambda net, x: torch.cat([net.weight, x]),
    "function": lambda net, x: Passed.apply(net.weight * x, None) * 1,
    "function that fills": lambda net, x: Filled.apply(net.weight, x) * 1,
    "written": written,
    "written in place": lambda net, x: (net.weight * 1).mul_(x),
}


def source_in(make):
    net = Net()
    with Noting(Sources(net, 2)) as mode:
        made = make(net, X)
        own = mode.sources.of(made)
    assert own == source_of(made.grad_fn)
    return own


@pytest.mark.parametrize("kind", OF_WEIGHTS)
def test_what_is_made_of_weights_and_constants_has_the_name_of_one(kind):
    assert source_in(OF_WEIGHTS[kind]) == GradientSource("weight", 2)


@pytest.mark.parametrize("kind", OF_SAMPLES)
def test_what_samples_are_in_is_of_samples(kind):
    assert source_in(OF_SAMPLES[kind]) == GradientSource("", 2)


def test_what_was_not_followed_is_not_known():
    assert source_of((Net().weight * 2).grad_fn) is None
