"""Collectives along the sequence, with gradients: activations ``[B, S, ...]`` and shards ``[B, s, ...]``.

Sequences of any length are split into as many shards as ranks; they differ by at most one position, the first ones
are longer. For communication they are padded to the longest. In a trace tensors are fake, and nothing is communicated.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hybridpp.cluster import Group, Mapped, Pending
from hybridpp.nn.torch_private import has_no_data
from hybridpp.sharded_activations.collectives import linear_map, mapped, unchanged


def shard_lengths(length: int, size: int) -> list[int]:
    """The number of positions that each rank holds of a sequence.

    Example:
        >>> shard_lengths(65, 4)
        [17, 16, 16, 16]
    """
    return [length // size + (rank < length % size) for rank in range(size)]


def own_shard(full: Tensor, group: Group) -> Tensor:
    """This rank's shard of a full ``[B, S, ...]``, in memory of its own."""
    lengths = shard_lengths(full.shape[1], group.size)
    own = full.narrow(1, sum(lengths[: group.rank]), lengths[group.rank])
    return own.clone(memory_format=torch.contiguous_format)


def gather_shards(shard: Tensor, length: int, group: Group) -> Tensor:
    """The full activation ``[B, S, ...]`` from all ranks' shards. Collective: one all-gather."""
    if has_no_data(shard):
        return shard.new_empty((shard.shape[0], length, *shard.shape[2:]))
    return start_gather_shards(shard, length, group).wait()


def start_gather_shards(shard: Tensor, length: int, group: Group) -> Pending[Tensor]:
    """Start :func:`gather_shards`, of a shard that is not fake. Collective: one all-gather."""
    lengths = shard_lengths(length, group.size)

    def concatenate(parts: list[Tensor]) -> Tensor:
        return torch.cat([part.narrow(1, 0, own) for part, own in zip(parts, lengths, strict=True)], 1)

    return Mapped(group.start_all_gather(_padded(shard, lengths[0])), concatenate)


def reduce_scatter_shards(summand: Tensor, group: Group, overlap_fn: Callable[[], None] | None = None) -> Tensor:
    """This rank's shard of the sum of the ranks' tensors, ``[B, S, ...]`` each.

    Args:
        summand: this rank's tensor.
        group: the ranks.
        overlap_fn: called while the sum is being computed.

    Collective: one reduce-scatter.
    """
    lengths = shard_lengths(summand.shape[1], group.size)
    own = lengths[group.rank]
    if has_no_data(summand):
        return summand.new_empty((summand.shape[0], own, *summand.shape[2:]))
    if lengths[0] != lengths[-1]:
        summand = torch.cat([_padded(part, lengths[0]) for part in torch.split(summand, lengths, 1)], 1)
    pending = group.start_reduce_scatter(summand, 1)
    if overlap_fn is not None:
        overlap_fn()
    # No view: the result of an autograd function may be written to afterwards (`hidden_states += residual`).
    return pending.wait().narrow(1, 0, own).clone(memory_format=torch.contiguous_format)


def _padded(shard: Tensor, length: int) -> Tensor:
    missing = length - shard.shape[1]
    padding = (0, 0) * (shard.dim() - 2) + (0, missing)
    return functional.pad(shard, padding).contiguous() if missing else shard.contiguous()


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summand: Tensor, bias: Tensor | None, group: Group) -> Tensor:
        ctx.length, ctx.group = summand.shape[1], group
        own = reduce_scatter_shards(summand, group)
        return own if bias is None else own.add_(bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        full = full_gradient(dy, ctx.length, ctx.group)
        bias_gradient = None
        if ctx.needs_input_grad[1]:
            bias_gradient = replicated_sum(full.reshape(-1, full.shape[-1]).sum(0), ctx.group)
        return full, bias_gradient, None


def full_gradient(dy: Tensor, length: int, group: Group) -> Tensor:
    """The gradient of a sum from that of this rank's shard of it, for ranks that each go on differently.

    Collective: one all-gather over ``group``; every member must call it.
    """
    reduce_scatter = partial(reduce_scatter_shards, group=group)
    return mapped(dy, partial(gather_shards, length=length, group=group), reduce_scatter)


def replicated_sum(total: Tensor, group: Group) -> Tensor:
    """``total``, which each rank has computed completely from a :func:`full_gradient`.

    The gradient of that is summed over the ranks, so each takes its part of what all get.
    """
    return mapped(total, unchanged, lambda dy: dy / group.size)


def shard_sequence(full: Tensor, group: Group) -> Tensor:
    """This rank's shard of a replicated activation; its gradient is gathered.

    Collective: one all-gather over ``group`` in the backward pass; every member must run it.
    """
    gather = partial(gather_shards, length=full.shape[1], group=group)
    return linear_map(full, partial(own_shard, group=group), gather)


def gather_sequence(shard: Tensor, length: int, group: Group) -> Tensor:
    """The full activation of sequences of ``length``, for replicated computations.

    Collective: one all-gather over ``group``; every member must call it.
    """
    gather = partial(gather_shards, length=length, group=group)
    return linear_map(shard, gather, partial(own_shard, group=group))


def copy_sequence(shard: Tensor, full: Tensor, group: Group, overlap_fn: Callable[[], None]) -> Tensor:
    """The full activation of ``shard``, for ranks that each compute something else with it.

    Args:
        shard: this rank's; it gets its part of the sum of the ranks' gradients.
        full: what :func:`gather_sequence` returned for it.
        group: the ranks.
        overlap_fn: called while the gradient is being summed.

    Collective: one reduce-scatter over ``group`` in the backward pass; every member must run it.
    """
    known = full.detach()
    gather = partial(gather_shards, length=full.shape[1], group=group)
    reduce_scatter = partial(reduce_scatter_shards, group=group, overlap_fn=overlap_fn)
    return linear_map(shard, lambda _: known.view_as(known), reduce_scatter, gather)


def regather_sequence(shard: Tensor, length: int, group: Group) -> Tensor:
    """What :func:`copy_sequence` gives, gathered once more.

    Collective: one all-gather over ``group``, and one reduce-scatter in the backward pass; every member must call it.
    """
    gather = partial(gather_shards, length=length, group=group)
    return linear_map(shard, gather, partial(reduce_scatter_shards, group=group))


def reduce_scatter_sequence(summand: Tensor, bias: Tensor | None, group: Group) -> Tensor:
    """This rank's shard of the sum of the ranks' tensors, plus a replicated bias with a complete gradient.

    Collective: one reduce-scatter over ``group`` forwards, one all-gather backwards; every member must run it.
    """
    shard: Tensor = _ReduceScatterSequence.apply(summand, bias, group)  # type: ignore[no-untyped-call]  # torch
    return shard
