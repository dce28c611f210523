"""Count floating-point operations."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count


def flop_counter() -> FlopCounterMode:
    """A counter that counts attention on the CPU too; torch's own (2.13) knows only the kernels of CUDA."""
    return FlopCounterMode(
        display=False,
        custom_mapping={torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops},
    )


def _attention_flops(
    query_shape: Sequence[int], key_shape: Sequence[int], value_shape: Sequence[int], *_: Any, **__: Any
) -> int:
    return int(sdpa_flop_count(query_shape, key_shape, value_shape))  # type: ignore[no-untyped-call]
