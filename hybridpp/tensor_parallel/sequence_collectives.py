"""Collectives along the sequence, with their gradients: activations ``[B, S, ...]``, and shards ``[B, s, ...]``.

Sequences of any length are cut into as many shards, which differ by one place at most; the first ones are the longer
ones. On the wire all are as long as the longest. Tensors of a trace are fake, and nothing is communicated.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from hybridpp.cluster import Group, Pending
from hybridpp.tensor_parallel.collectives import is_fake

T = TypeVar("T")


class _Then(Generic[T]):
    """What becomes of what a communication gives."""

    def __init__(self, pending: Pending[T], function: Callable[[T], Tensor]):
        self._pending, self._function = pending, function

    def wait(self) -> Tensor:
        return self._function(self._pending.wait())


def shard_lengths(length: int, size: int) -> list[int]:
    """How many places of a sequence each rank has.

    Example:
        >>> shard_lengths(65, 4)
        [17, 16, 16, 16]
    """
    return [length // size + (rank < length % size) for rank in range(size)]


def own_shard(whole: Tensor, group: Group) -> Tensor:
    """This rank's shard of a whole ``[B, S, ...]``; memory of its own."""
    lengths = shard_lengths(whole.shape[1], group.size)
    own = whole.narrow(1, sum(lengths[: group.rank]), lengths[group.rank])
    return own.clone(memory_format=torch.contiguous_format)


def joined_shards(shard: Tensor, length: int, group: Group) -> Tensor:
    """All ranks' shards, one behind the other: ``[B, S, ...]``. Collective: one all-gather."""
    if is_fake(shard):
        return shard.new_empty((shard.shape[0], length, *shard.shape[2:]))
    return start_joining(shard, length, group).wait()


def start_joining(shard: Tensor, length: int, group: Group) -> Pending[Tensor]:
    """Start :func:`joined_shards`, of a shard that is not fake. Collective: one all-gather."""
    lengths = shard_lengths(length, group.size)

    def join(parts: list[Tensor]) -> Tensor:
        return torch.cat([part.narrow(1, 0, own) for part, own in zip(parts, lengths, strict=True)], 1)

    return _Then(group.start_all_gather(_filled(shard, lengths[0])), join)


def summed_shard(summand: Tensor, group: Group, meanwhile: Callable[[], None] | None = None) -> Tensor:
    """This rank's shard of the sum of what the ranks hold, ``[B, S, ...]`` each.

    Args:
        summand: what this rank holds.
        group: the ranks.
        meanwhile: called while it is being summed.

    Collective: one reduce-scatter.
    """
    lengths = shard_lengths(summand.shape[1], group.size)
    own = lengths[group.rank]
    if is_fake(summand):
        return summand.new_empty((summand.shape[0], own, *summand.shape[2:]))
    if lengths[0] != lengths[-1]:
        summand = torch.cat([_filled(part, lengths[0]) for part in torch.split(summand, lengths, 1)], 1)
    pending = group.start_reduce_scatter(summand, 1)
    if meanwhile is not None:
        meanwhile()
    # No view: what a function of autograd's own returns may be written to afterwards (`hidden_states += residual`).
    return pending.wait().narrow(1, 0, own).clone(memory_format=torch.contiguous_format)


def _filled(shard: Tensor, length: int) -> Tensor:
    missing = length - shard.shape[1]
    filling = (0, 0) * (shard.dim() - 2) + (0, missing)
    return functional.pad(shard, filling).contiguous() if missing else shard.contiguous()


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Group) -> Tensor:
        ctx.length, ctx.group = whole.shape[1], group
        return own_shard(whole, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return joined_shards(dy, ctx.length, ctx.group), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, length: int, group: Group) -> Tensor:
        ctx.group = group
        return joined_shards(shard, length, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return own_shard(dy, ctx.group), None, None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, whole: Tensor, group: Group, meanwhile: Callable[[], None]) -> Tensor:
        ctx.group, ctx.meanwhile = group, meanwhile
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return summed_shard(dy, ctx.group, ctx.meanwhile), None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summand: Tensor, bias: Tensor | None, group: Group) -> Tensor:
        ctx.length, ctx.group = summand.shape[1], group
        own = summed_shard(summand, group)
        return own if bias is None else own.add_(bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        whole = joined_shards(dy, ctx.length, ctx.group)
        bias_gradient = whole.reshape(-1, whole.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
        return whole, bias_gradient, None


def shard_sequence(whole: Tensor, group: Group) -> Tensor:
    """This rank's shard of a whole activation; its gradient is whole again.

    Collective: one all-gather over ``group`` in the backward pass; every member must run it.
    """
    shard: Tensor = _Shard.apply(whole, group)  # type: ignore[no-untyped-call]  # torch
    return shard


def join_sequence(shard: Tensor, length: int, group: Group) -> Tensor:
    """The whole activation of sequences of ``length``, for what every rank computes alike.

    Collective: one all-gather over ``group``; every member must call it.
    """
    whole: Tensor = _Join.apply(shard, length, group)  # type: ignore[no-untyped-call]  # torch
    return whole


def copy_sequence(shard: Tensor, whole: Tensor, group: Group, meanwhile: Callable[[], None]) -> Tensor:
    """The whole activation that ``shard`` is this rank's of, for ranks that each make something else of it.

    Args:
        shard: what the gradient goes back to: its part of the ranks' sum.
        whole: what :func:`join_sequence` made of it.
        group: the ranks.
        meanwhile: called while the gradient is being summed.

    Collective: one reduce-scatter over ``group`` in the backward pass; every member must run it.
    """
    copied: Tensor = _Copy.apply(shard, whole.detach(), group, meanwhile)  # type: ignore[no-untyped-call]  # torch
    return copied


def sum_sequence(summand: Tensor, bias: Tensor | None, group: Group) -> Tensor:
    """This rank's shard of the sum of what the ranks hold, plus a bias that all have; that one's gradient is whole.

    Collective: one reduce-scatter over ``group`` forwards, one all-gather backwards; every member must run it.
    """
    shard: Tensor = _Sum.apply(summand, bias, group)  # type: ignore[no-untyped-call]  # torch
    return shard
