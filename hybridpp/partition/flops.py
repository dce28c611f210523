"""Count floating-point operations."""

import math
from collections.abc import Sequence
from typing import Any

from torch.utils.flop_counter import FlopCounterMode

from hybridpp.nn.torch_private import ATTENTION_OPS, GROUPED_MM


class _OneModule:
    """Stands for torch's tracker of the module that runs, whose hooks take longer than the counting."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        pass


def flop_counter() -> FlopCounterMode:
    """A counter of all FLOPs, also of what torch's counter omits: attention on the CPU, and grouped matrix products.

    Torch's count for attention (2.11) refuses fewer heads of keys than of queries, so all attention is counted here.
    """
    counts = dict.fromkeys(ATTENTION_OPS, _attention_flops) | {GROUPED_MM: _grouped_flops}
    counter = FlopCounterMode(display=False, custom_mapping=counts)
    counter.mod_tracker = _OneModule()  # type: ignore[assignment]  # all that the counter reads of a tracker
    return counter


def _attention_flops(
    query_shape: Sequence[int], key_shape: Sequence[int], value_shape: Sequence[int], *_: Any, **__: Any
) -> int:
    # Shapes are [batch, heads, sequence, width]: queries times keys, then weights times values.
    return 2 * math.prod(query_shape[:3]) * key_shape[2] * (query_shape[3] + value_shape[3])


def _grouped_flops(first_shape: Sequence[int], second_shape: Sequence[int], *_: Any, **__: Any) -> int:
    # Groups are along a dimension of both, or share out the columns of the second alone.
    repeated = first_shape[0] if len(first_shape) > len(second_shape) else 1
    return 2 * math.prod(first_shape) * second_shape[-1] // repeated
