"""Count floating-point operations."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.utils.flop_counter import FlopCounterMode

from hybridpp.nn.torch_private import (
    ATTENTION_BACKWARD_OPS,
    ATTENTION_OPS,
    GROUPED_MM,
    OpOverload,
    TorchDispatchMode,
    is_composite,
)


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """Counts all FLOPs, also those that torch's counter omits: attention on the CPU, and grouped matrix products.

    Torch's counter (2.13) takes a third of the time of a block on fakes, nearly all of it for operators that it does
    not count, so it gets composite operators only. Its count for attention refuses fewer heads of keys than of
    queries, and counts the keys that a causal kernel leaves out, so all attention is counted here.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self._torch_counter = FlopCounterMode(display=False, custom_mapping=_COUNTS)
        self._torch_counter.mod_tracker = _OneModule()  # type: ignore[assignment]  # all that the counter reads of a tracker
        self._total = 0

    def get_total_flops(self) -> int:
        """The FLOPs so far."""
        return self._total

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.counted(func, args, kwargs or {})

    def counted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operator, whose FLOPs are counted: for code that sees it without this context."""
        kind = _KINDS.get(func)
        if kind is None:
            kind = _KINDS[func] = _kind(func, self._torch_counter)
        if kind is _COMPOSITE:
            with self._torch_counter:
                result = func(*args, **kwargs)
            self._total += self._torch_counter.get_total_flops()
            return result
        result = func(*args, **kwargs)
        if kind is not _FREE:
            self._total += kind(*args, **kwargs, out_val=result)
        return result


class _OneModule:
    """Replaces torch's tracker of the module that runs, whose hooks take longer than the counting."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        pass


def _kind(func: Any, torchs: FlopCounterMode) -> Callable[..., int]:
    if not isinstance(func, OpOverload) or is_composite(func):
        return _COMPOSITE
    count: Callable[..., int] = torchs.flop_registry.get(func.overloadpacket, _FREE)
    return count


def _COMPOSITE(*_: Any, **__: Any) -> int:
    raise AssertionError("a composite operator is counted by its parts")


def _FREE(*_: Any, **__: Any) -> int:
    return 0


def _attention_flops(causal_at: int, *shapes: Any, is_causal: bool | None = None, **_: Any) -> int:
    """Of attention: queries times keys, then weights times values.

    Args:
        causal_at: position of the argument that says whether later keys are left out.
        shapes: of queries, keys and values, ``[batch, heads, sequence, width]``; then other arguments.
        is_causal: that argument, where it was given by name.
    """
    query, key, value = shapes[:3]
    return 2 * _num_pairs(query, key, is_causal, causal_at, shapes) * int(query[3] + value[3])


def _attention_backward_flops(causal_at: int, *shapes: Any, is_causal: bool | None = None, **_: Any) -> int:
    """Of its backward pass, which computes the weights again: three products as wide as keys, two as wide as values."""
    _, query, key, value = shapes[:4]
    return 2 * _num_pairs(query, key, is_causal, causal_at, shapes) * int(3 * query[3] + 2 * value[3])


def _num_pairs(
    query: Sequence[int], key: Sequence[int], is_causal: bool | None, causal_at: int, given: Sequence[Any]
) -> int:
    """Pairs of a query and a key for which kernels compute something."""
    if is_causal is None:
        is_causal = len(given) > causal_at and bool(given[causal_at])
    queries, keys = query[2], key[2]
    seen = min(queries, keys)
    pairs = seen * (seen + 1) // 2 + (queries - seen) * keys if is_causal else queries * keys
    return math.prod(query[:2]) * pairs


def _grouped_flops(first_shape: Sequence[int], second_shape: Sequence[int], *_: Any, **__: Any) -> int:
    # Groups are along a dimension of both, or divide the columns of the second only.
    repeated = first_shape[0] if len(first_shape) > len(second_shape) else 1
    return 2 * math.prod(first_shape) * second_shape[-1] // repeated


_COUNTS = {
    **{op: partial(_attention_flops, causal_at) for op, causal_at in ATTENTION_OPS.items()},
    **{op: partial(_attention_backward_flops, causal_at) for op, causal_at in ATTENTION_BACKWARD_OPS.items()},
    GROUPED_MM: _grouped_flops,
}
# The count of each operator seen so far; it depends on torch only.
_KINDS: dict[Any, Callable[..., int]] = {}
