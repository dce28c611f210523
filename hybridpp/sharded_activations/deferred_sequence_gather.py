"""Sequence shards with the shape of full activations: passed from block to block, gathered where others read them."""

from typing import Any

import torch
from torch import Tensor

from hybridpp.cluster import Group
from hybridpp.nn.torch_private import VERSION, has_no_data, version_of
from hybridpp.sharded_activations.deferred_gather import DeferredGatherTensor, deferred_gather, elementwise
from hybridpp.sharded_activations.sequence_collectives import gather_sequence, gather_shards, own_shard, shard_sequence


class DeferredSequenceTensor(DeferredGatherTensor):
    """A full activation ``[B, S, ...]`` of which this rank holds the shard ``[B, s, ...]``.

    A block on sequence shards continues with the shard; anything else gathers it first. Conversions and arithmetic with
    numbers keep it sharded.
    """

    def gather_with_gradient(self) -> Tensor:
        if not self.has_gradient_of_local():
            return super().gather_with_gradient()
        # The shard's current values: a block may have written to it, as it would to the full activation.
        return gather_sequence(self.local, self.width, self.group)

    @classmethod
    def joined(cls, shard: Tensor, group: Group, dim: int, width: int) -> Tensor:
        return gather_shards(shard, width, group)

    @classmethod
    def own(cls, full: Tensor, group: Group, dim: int, width: int) -> Tensor:
        return own_shard(full, group)


def _version(lazy: DeferredGatherTensor, get: Any) -> int:
    # The shard's version: a block that writes to its input writes there.
    return version_of(lazy.local)


DeferredSequenceTensor.kept = {
    VERSION.__get__: _version,
    **dict.fromkeys((Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to), elementwise),
    **dict.fromkeys((Tensor.contiguous, Tensor.detach, torch.detach), elementwise),
    **dict.fromkeys((Tensor.mul, torch.mul, Tensor.__mul__, Tensor.__rmul__), elementwise),
    **dict.fromkeys((Tensor.div, torch.div, Tensor.__truediv__), elementwise),
}


def deferred_sequence_gather(shard: Tensor, length: int, group: Group) -> Tensor:
    """The full activation of sequences of ``length`` as a :class:`DeferredSequenceTensor`; in a trace, a plain one.

    Collective: one all-gather over ``group``, at the first operation other than :func:`local_sequence_shard`.
    """
    if has_no_data(shard) or torch.compiler.is_compiling():
        return gather_sequence(shard, length, group)
    return deferred_gather(shard, group, 1, length, kind=DeferredSequenceTensor)


def local_sequence_shard(full: Tensor, group: Group) -> Tensor:
    """This rank's shard of a full activation, which may be a :class:`DeferredSequenceTensor`.

    Collective: for a plain one, one all-gather over ``group`` in the backward pass; every member must run it.
    """
    if isinstance(full, DeferredSequenceTensor) and full.is_sharded():
        return full.local
    if isinstance(full, DeferredGatherTensor):
        full = full.full_tensor()
    return shard_sequence(full, group)
