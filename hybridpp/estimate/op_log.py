"""What the operators of a run compute and move."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridpp.estimate.allocations import AllocationLog
from hybridpp.partition import FlopCounter


class Op(NamedTuple):
    """One operator, or one communication.

    Attributes:
        event: of the log, when it had run.
        flops: floating-point operations of products; 0: it only moves numbers.
        num_bytes: of its arguments and results.
        dtype: of its result.
        message: kind of the communication; empty: it is an operator.
    """

    event: int
    flops: int
    num_bytes: int
    dtype: torch.dtype | None
    message: str = ""


class OpLog(AllocationLog):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """Also records each operator. Push it on top of a :class:`FlopCounter`.

    Args:
        counter: counts the FLOPs.

    Attributes:
        ops: in order.
    """

    def __init__(self, counter: FlopCounter) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self._counter = counter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = self._counter.get_total_flops()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if not getattr(func, "is_view", False):
            leaves = [*_all_tensors((args, kwargs or {})), *_all_tensors(result)]
            size = sum(leaf.numel() * leaf.dtype.itemsize for leaf in leaves)
            dtype = leaves[-1].dtype if leaves else None
            self.ops.append(Op(self.event, self._counter.get_total_flops() - before, size, dtype))
        return result

    def note_message(self, kind: str, num_bytes: int) -> None:
        """Record a communication."""
        self.ops.append(Op(self.event, 0, num_bytes, None, kind))


def _all_tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, list | tuple):
        return [leaf for one in tree for leaf in _all_tensors(one)]
    if isinstance(tree, dict):
        return [leaf for one in tree.values() for leaf in _all_tensors(one)]
    return []
