"""Replicas of a small model whose gradients add up in buckets."""

import torch
from torch import nn

from hybridpp.cluster import Loopback, current_world
from hybridpp.data_parallel import GradientBuckets, layout_of

NUM_REPLICAS = 3
TINY_MIB = 64 / 2**20  # 16 fp32 elements: one parameter per bucket


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 7, bias=False), nn.Linear(7, 1)).to(dtype)


def data(replica, number, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * replica + number)
    return torch.randn(2, 4, generator=generator).to(dtype)


def loss(model, replica, number):
    return model(data(replica, number, next(model.parameters()).dtype)).float().square().sum()


def plain(num_replicas, numbers):
    """The same sums by plain accumulation in one process."""
    model = make_model()
    for replica in range(num_replicas):
        for number in numbers:
            loss(model, replica, number).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def make_buckets(model, group=None, capacity_mib=25.0, shared=None, **options):
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return buckets_of(trainable, group, capacity_mib, shared, **options)


def buckets_of(parameters, group=None, capacity_mib=25.0, shared=None, **options):
    group = group or current_world().control()
    layout = layout_of(parameters, group, capacity_mib, shared=shared or ())
    return GradientBuckets(parameters, group, layout, shared, **options)


def accumulate(buckets, model, numbers):
    """What a pipeline step does: several backward passes, the last one announced, then the rest of the reduction."""
    replica = current_world().rank
    buckets.begin()
    for number in numbers:
        if number == numbers[-1]:
            buckets.begin_last_backward()
        loss(model, replica, number).backward()
    buckets.launch_remaining()
    buckets.finish_grad_sync()


def assert_equal(buckets, expected):
    assert set(buckets.gradients) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(buckets.gradients[name], gradient, rtol=1e-5, atol=1e-5, msg=f"{name} differs")


def on_replicas(function, num_replicas=NUM_REPLICAS):
    return Loopback(num_replicas).run(function)
