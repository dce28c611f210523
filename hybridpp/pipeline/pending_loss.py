"""A loss that other ranks compute: a tensor that waits for them when it is read."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridpp.nn.torch_private import DisableTorchFunctionSubclass, make_wrapper_subclass, pytree

# What is known before the value is.
_METADATA = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_cpu", "grad_fn")
} | {Tensor.dim, Tensor.size, Tensor.numel, Tensor.is_floating_point}


class PendingLoss(Tensor):
    """An fp32 scalar without gradient. Every operation on it waits for its value, and returns ordinary tensors.

    Args:
        wait: returns the value; called once.
        device: of the value.
    """

    wait: Callable[[], Tensor] | None
    known: Tensor | None

    @staticmethod
    def __new__(cls, wait: Callable[[], Tensor], device: torch.device) -> "PendingLoss":
        loss: PendingLoss = make_wrapper_subclass(cls, (), dtype=torch.float32, device=device)  # type: ignore[assignment]
        loss.wait, loss.known = wait, None
        return loss

    def __init__(self, wait: Callable[[], Tensor], device: torch.device):
        super().__init__()

    # No cached_property: before Python 3.12 its lock is one for all losses, and in-process ranks are threads.
    @property
    def value(self) -> Tensor:
        """The loss, once it is known; raises what waiting for it raises."""
        if self.known is None:
            assert self.wait is not None, "it holds the step's batch, so it is given up with the first call"
            self.known, self.wait = self.wait(), None
        return self.known

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _METADATA:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return _on_values(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a function of C there
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # What calls operators without Python's functions, such as collectives.
        return _on_values(func, args, kwargs or {})


def _on_values(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    args, kwargs = pytree.tree_map_only(PendingLoss, lambda loss: loss.value, (tuple(args), dict(kwargs)))
    return func(*args, **kwargs)
