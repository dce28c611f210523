"""Shards of sequences that look like the whole: handed from block to block, put together where others read them."""

from typing import Any

import torch
from torch import Tensor

from hybridpp.cluster import Group
from hybridpp.tensor_parallel.collectives import is_fake
from hybridpp.tensor_parallel.lazy_whole import LazyWhole, elementwise, lazily_whole
from hybridpp.tensor_parallel.sequence_collectives import join_sequence, joined_shards, own_shard, shard_sequence


class LazySequence(LazyWhole):
    """A whole activation ``[B, S, ...]`` of which this rank holds its shard ``[B, s, ...]``.

    A block on shards goes on with the shard; for everything else it is the whole, which is gathered then. Conversions
    and arithmetic with numbers keep it a shard.
    """

    def put_together(self) -> Tensor:
        if not self.has_gradient_of_local():
            return super().put_together()
        # From the shard as it is now: a block may have written to it since, as it would to the whole.
        return join_sequence(self.local, self.width, self.group)

    def numbers(self) -> Tensor:
        return joined_shards(self.local.detach(), self.width, self.group)

    @classmethod
    def own(cls, whole: Tensor, group: Group, dim: int, width: int) -> Tensor:
        return own_shard(whole, group)


def _version(lazy: LazyWhole, get: Any) -> int:
    # Of the shard: a block that writes to its input writes there.
    return lazy.local._version


LazySequence.kept = {
    getattr(Tensor, "_version").__get__: _version,  # noqa: B009  # its descriptor, not its value
    **dict.fromkeys((Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to), elementwise),
    **dict.fromkeys((Tensor.contiguous, Tensor.detach, torch.detach), elementwise),
    **dict.fromkeys((Tensor.mul, torch.mul, Tensor.__mul__, Tensor.__rmul__), elementwise),
    **dict.fromkeys((Tensor.div, torch.div, Tensor.__truediv__), elementwise),
}


def lazily_joined(shard: Tensor, length: int, group: Group) -> Tensor:
    """The whole activation of sequences of ``length``, as a :class:`LazySequence`; of a trace, one that is whole.

    Collective: one all-gather over ``group``, where something else than :func:`shard_of` is done to it.
    """
    if is_fake(shard) or torch.compiler.is_compiling():
        return join_sequence(shard, length, group)
    return lazily_whole(shard, group, 1, length, kind=LazySequence)


def shard_of(whole: Tensor, group: Group) -> Tensor:
    """This rank's shard of a whole activation, which may be a :class:`LazySequence`.

    Collective: of a plain one, one all-gather over ``group`` in the backward pass; every member must run it.
    """
    if isinstance(whole, LazySequence) and whole.is_divided():
        return whole.local
    if isinstance(whole, LazyWhole):
        whole = whole.whole()
    return shard_sequence(whole, group)
