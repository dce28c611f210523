"""A stream beside the current one, and page-locked memory: a device copies inputs while it computes."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


class SideStream(Protocol):
    """A stream of the device that copies run on while the current stream computes."""

    def active(self) -> AbstractContextManager[Any]:
        """Inside, operations are queued on this stream."""

    def wait_for_current(self) -> None:
        """Let this stream wait for what is queued on the current one."""

    def mark(self) -> Any:
        """The end of what is queued here now."""

    def hand_over(self, mark: Any, tensors: Sequence[Tensor]) -> None:
        """Let the current stream wait for a mark, and use tensors that were made before it."""


class CudaSideStream:
    """A side stream of a CUDA device."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch

    def active(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def wait_for_current(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def mark(self) -> Any:
        return self._stream.record_event()

    def hand_over(self, mark: Any, tensors: Sequence[Tensor]) -> None:
        current = torch.cuda.current_stream(self._device)
        current.wait_event(mark)
        for tensor in tensors:
            # The allocator must not give its memory away while the current stream uses it.
            tensor.record_stream(current)


def page_locked(leaf: Tensor) -> Tensor:
    """A tensor of host memory where a device copies it without the host: itself if it can, else a copy."""
    return leaf if _is_fast_source(leaf) else torch.empty_like(leaf, pin_memory=True).copy_(leaf)


def _is_fast_source(leaf: Tensor) -> bool:
    """Whether a device can copy this host tensor without the host: page-locked, and without gaps."""
    if leaf.layout is not torch.strided or leaf.requires_grad:
        return True  # as torch does it
    dense = leaf.is_contiguous() or (leaf.dim() == 4 and leaf.is_contiguous(memory_format=torch.channels_last))
    return dense and leaf.is_pinned()
