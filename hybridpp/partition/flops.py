"""Count floating-point operations."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count


def flop_counter() -> FlopCounterMode:
    """A counter that also counts what torch's own (2.13) leaves out: attention on the CPU, and experts' products."""
    return FlopCounterMode(
        display=False,
        custom_mapping={
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
            torch.ops.aten._grouped_mm: _grouped_flops,
        },
    )


def _attention_flops(
    query_shape: Sequence[int], key_shape: Sequence[int], value_shape: Sequence[int], *_: Any, **__: Any
) -> int:
    return int(sdpa_flop_count(query_shape, key_shape, value_shape))  # type: ignore[no-untyped-call]


def _grouped_flops(first_shape: Sequence[int], second_shape: Sequence[int], *_: Any, **__: Any) -> int:
    # Groups are along a dimension of both, or share out the columns of the second alone.
    repeated = first_shape[0] if len(first_shape) > len(second_shape) else 1
    return 2 * math.prod(first_shape) * second_shape[-1] // repeated
