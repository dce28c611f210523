"""Joined activations of which only the own shard is kept for the backward pass, which joins it again."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hybridpp.cluster import Group, Pending
from hybridpp.tensor_parallel.sequence_collectives import start_joining


class Rejoined:
    """A whole activation, joined again in the backward pass: once for all layers that read it.

    Args:
        length: of the sequences.
        group: the ranks that have shards of them.
    """

    def __init__(self, length: int, group: Group):
        self._length, self._group = length, group
        self._num_readers = self._num_left = 0
        self._pending: Pending[Tensor] | None = None
        self._whole: Tensor | None = None

    def expect(self) -> None:
        """One more layer will ask for it."""
        self._num_readers += 1
        self._num_left += 1

    def start(self, shard: Tensor) -> None:
        """Start to join, unless that is done. Collective: one all-gather, if so."""
        if self._pending is None and self._whole is None:
            self._pending = start_joining(shard.detach(), self._length, self._group)

    def take(self) -> Tensor:
        """The whole, which was started; the last reader's call lets go of it."""
        if self._pending is not None:
            self._whole, self._pending = self._pending.wait(), None
        whole = self._whole
        assert whole is not None, "start was called before"
        self._num_left -= 1
        if self._num_left == 0:
            # A graph that is kept may be gone back through again.
            self._whole, self._num_left = None, self._num_readers
        return whole


class KeptShard(NamedTuple):
    """What one layer keeps of its input; see ``hybridpp.pipeline.layers.Kept``.

    Attributes:
        rejoined: shared by the layers that read the same.
        shape: of the layer's input.
    """

    rejoined: Rejoined
    shape: torch.Size

    def expect(self) -> None:
        """This layer will ask for it."""
        self.rejoined.expect()

    def start(self, shard: Tensor) -> None:
        """Start to join. Collective: one all-gather for all that share it."""
        self.rejoined.start(shard)

    def take(self) -> Tensor:
        """The layer's input."""
        return self.rejoined.take().view(self.shape)


class _Saved(NamedTuple):
    """What autograd holds in the place of a layer's input."""

    shard: Tensor
    version: int
    kept: KeptShard


@contextmanager
def saved_as_shard(x: Tensor, shard: Tensor, kept: KeptShard) -> Iterator[None]:
    """Inside, what autograd itself saves of a joined activation is the shard."""

    # Not x itself: autograd holds these functions as long as what they gave.
    place, size = x.untyped_storage()._cdata, x.numel()

    def pack(tensor: Tensor) -> Tensor | _Saved:
        if tensor.untyped_storage()._cdata != place or tensor.numel() != size:
            return tensor
        kept.expect()
        return _Saved(shard, shard._version, kept._replace(shape=tensor.shape))

    def unpack(saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if saved.shard._version != saved.version:
            raise RuntimeError(
                "an activation that the backward pass needs was written to in place after a divided layer had read it."
            )
        saved.kept.start(saved.shard)
        return saved.kept.take()

    with saved_tensors_hooks(pack, unpack):
        yield


def is_kept_by_others() -> bool:
    """Whether autograd hands what it saves to somebody else here: activation checkpointing, or a user's hooks."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def is_checkpointed() -> bool:
    """Whether what autograd saves here is computed again: then whole, just before it is used."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"
