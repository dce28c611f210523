import functools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from hybridpp.partition.flops import FlopCounter

B, H, S, D = 2, 3, 5, 4  # batch, heads, sequence, head width


def counted(function, *shapes, device="cpu"):
    with FakeTensorMode(), FlopCounter() as counter:
        function(*(torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in shapes))
    return counter.get_total_flops()


def test_what_modules_do_is_counted_as_by_torch():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(16, 5))
    with FlopCounter() as ours, FlopCounterMode(display=False) as theirs:
        model(torch.ones(2, 3, 4, 4)).sum().backward()
    convolution, linear = 2 * 2 * (2 * 2 * 4) * (3 * 3 * 3), 2 * 2 * 16 * 5
    # Backward: the images need no gradient.
    assert ours.get_total_flops() == theirs.get_total_flops() == 2 * convolution + 3 * linear


def test_attention_on_the_cpu_is_counted():
    shape = (B, H, S, D)
    assert counted(torch.nn.functional.scaled_dot_product_attention, shape, shape, shape) == 4 * B * H * S * S * D


def test_attention_with_fewer_heads_of_keys_is_counted_as_with_all():
    attention = functools.partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=True)
    assert counted(attention, (B, 2 * H, S, D), (B, H, S, D), (B, H, S, D)) == 4 * B * 2 * H * S * S * D


def test_causal_attention_is_counted_without_later_keys():
    """Its backward pass computes the weights again: five products for two."""
    attention = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
    pairs = S * (S + 1) // 2
    assert counted(attention, *[(B, H, S, D)] * 3) == 4 * B * H * pairs * D

    def both(*tensors):
        attention(*(tensor.requires_grad_() for tensor in tensors)).sum().backward()

    assert counted(both, *[(B, H, S, D)] * 3) == (4 + 10) * B * H * pairs * D
    # Of fewer keys than queries, the later queries see all.
    assert counted(attention, (B, H, S, D), *[(B, H, 2, D)] * 2) == 4 * B * H * (3 + (S - 2) * 2) * D


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("_scaled_dot_product_flash_attention", ()),
        ("_scaled_dot_product_efficient_attention", (None, True)),
        ("_scaled_dot_product_cudnn_attention", (None, True)),
    ],
)
def test_attention_on_cuda_is_counted(name, arguments):
    """Its kernels take fewer heads of keys, too."""

    def attention(query, key, value):
        return getattr(torch.ops.aten, name)(query, key, value, *arguments)

    shapes = (B, 2 * H, S, D), (B, H, S, D), (B, H, S, D)
    assert counted(attention, *shapes, device="cuda") == 4 * B * 2 * H * S * S * D


@pytest.mark.parametrize(
    ("first", "second", "flops"),
    [
        ((32, 16), (4, 16, 8), 2 * 32 * 16 * 8),
        ((4, 32, 16), (4, 16, 8), 2 * 4 * 32 * 16 * 8),
        ((4, 32, 16), (16, 8), 2 * 32 * 16 * 8),
        ((32, 16), (16, 8), 2 * 32 * 16 * 8),
    ],
)
def test_products_of_groups_are_counted(first, second, flops):
    def product(one, other):
        ragged = len(first) == 2 or len(second) == 2
        ends = torch.empty(4, dtype=torch.int32) if ragged else None
        return torch._grouped_mm(one, other, offs=ends)

    assert counted(product, first, second) == flops
