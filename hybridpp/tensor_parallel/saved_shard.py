"""Gathered activations of which only this rank's shard is saved; the backward pass gathers them again."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hybridpp.cluster import Group, Pending
from hybridpp.nn.torch_private import storage_id, version_of
from hybridpp.tensor_parallel.sequence_collectives import start_gather_shards


class RegatherHandle:
    """A full activation, gathered again in the backward pass: once for all layers that read it.

    Args:
        length: of the sequences.
        group: the ranks that hold shards of them.
    """

    def __init__(self, length: int, group: Group):
        self._length, self._group = length, group
        self._num_readers = self._num_left = 0
        self._pending: Pending[Tensor] | None = None
        self._whole: Tensor | None = None

    def expect(self) -> None:
        """One more layer will read it."""
        self._num_readers += 1
        self._num_left += 1

    def start(self, shard: Tensor) -> None:
        """Start the gather, unless it was started. Collective: one all-gather, if so."""
        if self._pending is None and self._whole is None:
            self._pending = start_gather_shards(shard.detach(), self._length, self._group)

    def take(self) -> Tensor:
        """The full activation, once :meth:`start` was called; the last reader's call frees it."""
        if self._pending is not None:
            self._whole, self._pending = self._pending.wait(), None
        whole = self._whole
        assert whole is not None, "start was called before"
        self._num_left -= 1
        if self._num_left == 0:
            # A retained graph may run backward again.
            self._whole, self._num_left = None, self._num_readers
        return whole


class SavedShard(NamedTuple):
    """What one layer saves of its input.

    Attributes:
        rejoined: shared by the layers that read the same input.
        shape: of the layer's input.
    """

    rejoined: RegatherHandle
    shape: torch.Size

    def expect(self) -> None:
        """This layer will read it."""
        self.rejoined.expect()

    def start(self, shard: Tensor) -> None:
        """Start the gather. Collective: one all-gather for all layers that share it."""
        self.rejoined.start(shard)

    def take(self) -> Tensor:
        """The layer's input."""
        return self.rejoined.take().view(self.shape)


class _Saved(NamedTuple):
    """What autograd saves in place of a layer's input."""

    shard: Tensor
    version: int
    kept: SavedShard


@contextmanager
def save_as_shard(x: Tensor, shard: Tensor, kept: SavedShard) -> Iterator[None]:
    """Inside, autograd saves the shard in place of the gathered activation."""

    # Not x itself: autograd holds these functions as long as their results.
    place, size = storage_id(x), x.numel()

    def pack(tensor: Tensor) -> Tensor | _Saved:
        if storage_id(tensor) != place or tensor.numel() != size:
            return tensor
        kept.expect()
        return _Saved(shard, version_of(shard), kept._replace(shape=tensor.shape))

    def unpack(saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if version_of(saved.shard) != saved.version:
            raise RuntimeError(
                "an activation that the backward pass needs was written to in place after a sharded layer had read it."
            )
        saved.kept.start(saved.shard)
        return saved.kept.take()

    with saved_tensors_hooks(pack, unpack):
        yield
