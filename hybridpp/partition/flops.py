"""Count floating-point operations."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

_ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_efficient_attention,
    torch.ops.aten._scaled_dot_product_cudnn_attention,
)


def flop_counter() -> FlopCounterMode:
    """A counter that also counts what torch's own leaves out: attention on the CPU, and experts' products.

    Torch's count for attention (2.11) refuses fewer heads of keys than of queries, so all attention is counted here.
    """
    counts = dict.fromkeys(_ATTENTION, _attention_flops) | {torch.ops.aten._grouped_mm: _grouped_flops}
    return FlopCounterMode(display=False, custom_mapping=counts)


def _attention_flops(
    query_shape: Sequence[int], key_shape: Sequence[int], value_shape: Sequence[int], *_: Any, **__: Any
) -> int:
    # Shapes are [batch, heads, sequence, width]: queries times keys, then weights times values.
    return 2 * math.prod(query_shape[:3]) * key_shape[2] * (query_shape[3] + value_shape[3])


def _grouped_flops(first_shape: Sequence[int], second_shape: Sequence[int], *_: Any, **__: Any) -> int:
    # Groups are along a dimension of both, or share out the columns of the second alone.
    repeated = first_shape[0] if len(first_shape) > len(second_shape) else 1
    return 2 * math.prod(first_shape) * second_shape[-1] // repeated
