"""Which entries of a tuple are read: seen by tensors that are there only when an operation needs them."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybridpp.nn.deferred_tensor import MadeWhenRead, deferred
from hybridpp.nn.torch_private import pytree


class ReadEntries:
    """A tuple or list with the same entries, of which it is known whether values of some were read.

    Args:
        batch: a tuple or list.
        indices: of the entries in question.

    Attributes:
        entries: like ``batch``; the tensors of the entries in question are made when they are read.
        watched: those of ``indices`` that hold a tensor of which that can be seen.
        read: those of ``indices`` that were read, or of which it cannot be seen.
    """

    def __init__(self, batch: Any, indices: Iterable[int]):
        self.watched = set[int]()
        self.read = set[int]()
        entries = list(batch)
        for index in indices:
            entries[index] = pytree.tree_map_only(Tensor, partial(self._noting, index), entries[index])
        self.read.update(index for index in indices if index not in self.watched)
        self.entries = batch
        if self.watched:
            self.entries = type(batch)(*entries) if hasattr(batch, "_fields") else type(batch)(entries)

    def _noting(self, index: int, tensor: Tensor) -> Tensor:
        is_known = isinstance(tensor, MadeWhenRead) or (type(tensor) is Tensor and tensor.layout is torch.strided)
        if not is_known:
            return tensor
        self.watched.add(index)
        return deferred(tensor, self._read(index, tensor), dtype=tensor.dtype, device=tensor.device)

    def _read(self, index: int, tensor: Tensor) -> Callable[[], Tensor]:
        def values() -> Tensor:
            self.read.add(index)
            return tensor.values_now() if isinstance(tensor, MadeWhenRead) else tensor

        return values
