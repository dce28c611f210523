"""On hollow tensors: CPUs have no kernels of CUDA."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from hybridpp.estimate import AllocationLog, CudaAttention, Hollow

B, H, S, D = 2, 8, 512, 64


def bytes_held(dtype=torch.bfloat16, keys=H, width=D, **options):
    """What attention keeps for its backward pass, beside its arguments; and that gradients have the right shapes."""
    with Hollow(), CudaAttention():
        shapes = (B, H, S, D), (B, keys, S, D), (B, keys, S, width)
        query, key, value = (torch.empty(shape, dtype=dtype, requires_grad=True) for shape in shapes)
        with AllocationLog() as log:
            result = scaled_dot_product_attention(query, key, value, **options)
            held = log.now
        assert (result.shape, result.dtype) == ((B, H, S, width), dtype)
        (result * result).sum().backward()
        assert all(one.grad.shape == one.shape for one in (query, key, value))
    return held


SUMS = 4 * B * H * S  # of each row's exponentials, in fp32
RESULT = 2 * B * H * S * D


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, RESULT + SUMS),
        ({"is_causal": True, "dropout_p": 0.1, "scale": 0.5}, RESULT + SUMS),
        ({"keys": 2, "enable_gqa": True}, RESULT + SUMS),
        ({"dtype": torch.float32}, 2 * RESULT + SUMS),
        ({"width": D // 2}, RESULT // 2 + SUMS),
        ({"keys": 2, "enable_gqa": True, "dtype": torch.float32}, 3 * 2 * RESULT + SUMS),
        ({"attn_mask": torch.ones(S, S, dtype=torch.bool)}, RESULT + SUMS + 2 * S * S),
    ],
)
def test_no_weights_are_kept(options, expected):
    assert bytes_held(**options) == pytest.approx(expected, abs=64)


def test_what_has_no_such_kernel_runs_as_ever():
    with CudaAttention():
        query = torch.ones(3, 5, 4)
        assert torch.equal(scaled_dot_product_attention(query, query, query), query)
        assert torch.equal(torch.relu(query), query)
