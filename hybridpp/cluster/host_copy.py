"""Copies in host memory of numbers on devices, from which messages of ranks are made."""

import zlib
from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

_NO_NUMBERS = torch.empty(0, dtype=torch.float64)


class HostCopy:
    """A copy of numbers, and of bytes of which only the digest is wanted, in host memory.

    Args:
        numbers: tensors of float64.
        unchecked: tensors of uint8 on a device.
        early: whether it is read later: on CUDA the host then waits for nothing that is started in between.
    """

    def __init__(self, numbers: Sequence[Tensor], unchecked: Sequence[Tensor], *, early: bool):
        pieces = [piece for piece in numbers if piece.numel()]
        self._has_bytes = bool(unchecked)
        self._num_numbers = sum(piece.numel() for piece in pieces)
        if unchecked:
            device = unchecked[0].device
            pieces = [piece.view(torch.uint8).to(device) for piece in (*pieces, *unchecked)]
        self._copy, self._event = torch.cat(pieces) if pieces else _NO_NUMBERS, None
        if early and self._copy.is_cuda:
            pinned = torch.empty(self._copy.shape, dtype=self._copy.dtype, pin_memory=True)
            pinned.copy_(self._copy, non_blocking=True)
            self._copy = pinned
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch
            self._event.record()

    def read(self) -> tuple[list[float], float]:
        """The numbers, and the digest of the bytes; -1 of none."""
        if self._event is not None:
            self._event.synchronize()
        if not self._has_bytes:
            return (self._copy.tolist() if self._num_numbers else []), -1.0
        host, size = self._copy.cpu().numpy(), 8 * self._num_numbers
        return host[:size].view(numpy.float64).tolist(), float(zlib.crc32(host[size:].tobytes()))
