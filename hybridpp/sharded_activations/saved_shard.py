"""Gathered activations of which only this rank's shard is saved; the backward pass gathers them again."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hybridpp.cluster import Group, Pending
from hybridpp.nn.torch_private import storage_id, version_of
from hybridpp.sharded_activations.sequence_collectives import regather_sequence, start_gather_shards


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
        self._full: Tensor | None = None

    def expect(self) -> None:
        """One more layer will read it."""
        self._num_readers += 1
        self._num_left += 1

    def with_gradient(self, shard: Tensor) -> Tensor:
        """The full activation, gathered so that gradients flow to the shard. Collective: one all-gather."""
        return regather_sequence(shard, self._length, self._group)

    def start(self, shard: Tensor) -> None:
        """Start the gather, unless it was started. Collective: one all-gather, if so."""
        if self._pending is None and self._full is None:
            self._pending = start_gather_shards(shard.detach(), self._length, self._group)

    def take(self) -> Tensor:
        """The full activation, once :meth:`start` was called; the last reader's call frees it."""
        if self._pending is not None:
            self._full, self._pending = self._pending.wait(), None
        full = self._full
        assert full is not None, "start was called before"
        self._num_left -= 1
        if self._num_left == 0:
            # A retained graph may run backward again.
            self._full, self._num_left = None, self._num_readers
        return full


class SavedShard(NamedTuple):
    """What one layer saves of its input.

    Attributes:
        regather: shared by the layers that read the same input.
        shape: of the layer's input.
    """

    regather: RegatherHandle
    shape: torch.Size

    def expect(self) -> None:
        """This layer will read it."""
        self.regather.expect()

    def start(self, shard: Tensor) -> None:
        """Start the gather. Collective: one all-gather for all layers that share it."""
        self.regather.start(shard)

    def take(self) -> Tensor:
        """The layer's input."""
        return self.regather.take().view(self.shape)

    def with_gradient(self, shard: Tensor) -> Tensor:
        """The layer's input, gathered so that gradients flow to the shard. Collective: one all-gather."""
        return self.regather.with_gradient(shard).view(self.shape)


class _PackedShard(NamedTuple):
    """What autograd saves in place of a layer's input."""

    shard: Tensor
    version: int
    saved_shard: SavedShard


@contextmanager
def save_as_shard(x: Tensor, shard: Tensor, saved_shard: SavedShard) -> Iterator[None]:
    """Inside, autograd saves the shard in place of the gathered activation."""

    # Not x itself: autograd holds these functions as long as what they saved.
    storage, size = storage_id(x), x.numel()

    def pack(tensor: Tensor) -> Tensor | _PackedShard:
        if storage_id(tensor) != storage or tensor.numel() != size:
            return tensor
        saved_shard.expect()
        return _PackedShard(shard, version_of(shard), saved_shard._replace(shape=tensor.shape))

    def unpack(packed: Tensor | _PackedShard) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if version_of(packed.shard) != packed.version:
            raise RuntimeError(
                "an activation that the backward pass needs was written to in place after a sharded layer had read it. "
                "Write the result to a new tensor, or leave enable_sequence_parallelism out."
            )
        packed.saved_shard.start(packed.shard)
        return packed.saved_shard.take()

    with saved_tensors_hooks(pack, unpack):
        yield
