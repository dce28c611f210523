"""Fused kernels: chosen where torch leaves the choice, and asked to divide the gradients."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop
from torch.utils._python_dispatch import TorchDispatchMode

from hybridpp.optim import HybridAdam, can_divide, divided_in_kernel, fuse_by_default

KINDS = [
    (Adam, {"weight_decay": 0.1}),
    (AdamW, {"maximize": True}),
    (HybridAdam, {}),
    (SGD, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    (Adagrad, {}),
]


def params(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((5, 7), (33,))
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_gradients(parameters, factor=1.0):
    generator = torch.Generator().manual_seed(1)
    for parameter in parameters:
        parameter.grad = (torch.randn(parameter.shape, generator=generator) * factor).to(parameter.dtype)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_fused_step_divides_and_leaves_the_divided_gradients(kind, options):
    ours, theirs = params(), params()
    optimizers = [kind(group, lr=0.1, fused=True, **options) for group in (ours, theirs)]
    for _ in range(2):
        set_gradients(ours, 3.3)
        set_gradients(theirs)
        assert can_divide(optimizers[0], ours)
        with divided_in_kernel(optimizers[0], 3.3):
            optimizers[0].step()
        optimizers[1].step()
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other)
            torch.testing.assert_close(one.grad, other.grad)
    assert not hasattr(optimizers[0], "grad_scale")


class OwnStep(AdamW):
    """Looks at gradients before the kernel does."""

    def step(self, closure=None):
        self.seen = [group["params"][0].grad for group in self.param_groups]
        return super().step(closure)


def fp64():
    return [nn.Parameter(parameter.detach().double()) for parameter in params()]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda given: AdamW(given[:1], fused=True), "not all gradients"),
        (lambda given: RMSprop(given), "no kernel"),
        (lambda given: OwnStep(given, fused=True), "its own step"),
    ],
)
def test_nothing_else_is_asked_to_divide(make, why):
    parameters = params()
    set_gradients(parameters)
    assert not can_divide(make(parameters), parameters), why


def test_who_sees_or_scales_gradients_before_the_step_is_respected():
    parameters = params()
    set_gradients(parameters)
    optimizer = AdamW(parameters, fused=True)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert can_divide(optimizer, parameters)
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    assert not can_divide(optimizer, parameters)
    handle.remove()
    optimizer.grad_scale = torch.ones(())
    assert not can_divide(optimizer, parameters)
    del optimizer.grad_scale
    optimizer.step = lambda: None
    assert not can_divide(optimizer, parameters)


def test_only_fp32_laid_out_like_the_parameter_is_divided():
    doubles = fp64()
    set_gradients(doubles)
    assert not can_divide(AdamW(doubles, fused=True), doubles)
    parameter = nn.Parameter(torch.randn(5, 7))
    parameter.grad = torch.randn(7, 5).t()
    assert not can_divide(HybridAdam([parameter]), [parameter])


class Passes(TorchDispatchMode):
    """Counts the calls on tensors of some size."""

    def __init__(self, size):
        super().__init__()
        self.size, self.names = size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(isinstance(arg, torch.Tensor) and arg.numel() >= self.size for arg in args):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_step_that_divides_is_one_kernel():
    parameters = [nn.Parameter(torch.ones(64))]
    optimizer = AdamW(parameters, fused=True)
    set_gradients(parameters)
    optimizer.step()
    with Passes(2) as passes, divided_in_kernel(optimizer, 2.0):
        optimizer.step()
    assert passes.names == []  # the kernel takes lists of tensors


@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_a_choice_that_is_left_to_torch_becomes_fused_and_is_undone(kind):
    ours, theirs = params(), params()
    optimizers = [kind(group, lr=0.1, weight_decay=0.1) for group in (ours, theirs)]

    def step():
        for group, optimizer in zip((ours, theirs), optimizers, strict=True):
            set_gradients(group)
            optimizer.step()
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other)

    step()
    undo = fuse_by_default(optimizers[0], ("cpu",))
    assert optimizers[0].param_groups[0]["fused"] is True
    step()
    saved = copy.deepcopy(optimizers[1].state_dict())
    optimizers[0].load_state_dict(saved)
    assert optimizers[0].param_groups[0]["fused"] is True
    step()
    undo()
    assert optimizers[0].param_groups[0]["fused"] is None
    optimizers[0].load_state_dict(copy.deepcopy(saved))
    assert optimizers[0].param_groups[0]["fused"] is None
    optimizers[1].load_state_dict(saved)
    step()


@pytest.mark.parametrize(
    ("make", "left"),
    [
        (lambda given: AdamW(given, foreach=True), None),
        (lambda given: AdamW(given, fused=False), False),
        (lambda given: AdamW(given, differentiable=True), None),
        (lambda given: SGD(given, lr=0.1), None),
        (lambda given: OwnStep(given), None),
        (lambda given: AdamW([given[0], nn.Parameter(torch.zeros(2, device="meta"))]), None),
    ],
)
def test_what_the_script_chose_is_left_alone(make, left):
    optimizer = make(params())
    fuse_by_default(optimizer, ("cpu",))
    assert optimizer.param_groups[0]["fused"] is left


def test_other_devices_are_left_alone():
    optimizer = AdamW(params())
    fuse_by_default(optimizer, ("cuda",))
    assert optimizer.param_groups[0]["fused"] is None
