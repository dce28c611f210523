"""Sums in flat buffers: what they start from, their format, and what is done to all of them."""

import pytest
import torch
from data_parallel.replicas import TINY_MIB, accumulate, assert_equal, buckets_of, loss, make_buckets, make_model, plain
from torch import nn


def test_zeros_are_written_once():
    model = make_model()
    buckets = make_buckets(model)
    accumulate(buckets, model, [0])
    model.zero_grad()
    buckets.zero()
    gradients, version = buckets.gradients, buckets.version
    buckets.zero()
    buckets.begin()
    assert buckets.version == version
    assert all(parameter.grad is gradients[name] for name, parameter in model.named_parameters())
    # What the script writes itself, and then drops, is forgotten like any other gradient.
    for parameter in model.parameters():
        parameter.grad.add_(1.0)
        parameter.grad = None
    accumulate(buckets, model, [1])
    assert_equal(buckets, plain(1, [1]))


@pytest.mark.parametrize("outside_first", [False, True])
def test_a_sum_starts_as_a_copy_of_its_first_part_wherever_that_comes_from(outside_first):
    model = make_model()
    buckets = make_buckets(model)
    accumulate(buckets, model, [0])
    buckets.consume()
    for gradient in buckets.gradients.values():
        gradient.fill_(torch.nan)  # what is left there does not count
    version = buckets.version
    buckets.begin()
    assert buckets.version == version  # and no zeros were written over it
    assert all(parameter.grad is None for parameter in model.parameters())
    parts = [lambda: loss(model, 0, 1).backward(), lambda: buckets.outside().add("0.weight", torch.ones(5, 4))]
    for part in reversed(parts) if outside_first else parts:
        part()
        assert model[0].weight.grad is not None
    assert all(parameter.grad is buckets.gradients[name] for name, parameter in model.named_parameters())
    expected = plain(1, [1])
    assert_equal(buckets, expected | {"0.weight": expected["0.weight"] + 1})


def test_zeros_are_there_for_whoever_asks_for_them():
    model = make_model()
    buckets = make_buckets(model)
    accumulate(buckets, model, [0])
    for _ in range(2):  # the second time there is nothing to write
        buckets.zero(set_to_none=False)
        assert all(not parameter.grad.any() for parameter in model.parameters())
    accumulate(buckets, model, [0])
    buckets.zero()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(not gradient.any() for gradient in buckets.gradients.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_add_up_in_fp32(dtype):
    parameter = nn.Parameter(torch.zeros(3, dtype=dtype))
    buckets = buckets_of({"w": parameter})
    buckets.begin()
    small = 2.0**-12  # lost beside 1 in half precision
    for factor in (1.0, small, small):
        (parameter * factor).float().sum().backward()
    buckets.finish_grad_sync()
    assert buckets.gradients["w"].dtype is torch.float32
    assert buckets.gradients["w"].tolist() == [1 + 2 * small] * 3
    assert parameter.grad is None


def test_float64_and_fp32_parameters_have_buckets_of_their_own():
    model = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1).double(), "c": nn.Linear(2, 1)})
    buckets = make_buckets(model)
    buckets.begin()
    (model["a"](torch.ones(2)) + model["b"](torch.ones(2).double()).float() + model["c"](torch.ones(2))).backward()
    buckets.finish_grad_sync()
    for name, parameter in model.named_parameters():
        assert parameter.grad is buckets.gradients[name]
        assert buckets.gradients[name].dtype == parameter.dtype
        assert torch.equal(parameter.grad, torch.ones_like(parameter))


def test_scale_and_clamp_reach_every_element():
    model = make_model()
    buckets = make_buckets(model, capacity_mib=TINY_MIB)
    accumulate(buckets, model, [0])
    expected = {name: (-2 * gradient).clamp(-0.5, 0.5) for name, gradient in plain(1, [0]).items()}
    buckets.scale(-2.0)
    buckets.clamp(0.5)
    assert_equal(buckets, expected)
