"""Replicated modules between sharded layers: norms over the width of all heads, which need the full activation."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hybridpp.cluster import Group
from hybridpp.module_adapter import AdapterLayer, ModuleAdapter
from hybridpp.nn.torch_private import has_no_data, pytree
from hybridpp.tensor_parallel.sharding_spec import DimShard
from hybridpp.tensor_parallel.tp_context import TensorParallelContext


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, part: DimShard, group: Group) -> Tensor:
        ctx.part, ctx.group = part, group
        whole = own.new_empty((*own.shape[:-1], sum(part.widths)))
        if has_no_data(own):
            return whole
        return whole.index_copy_(-1, _places(part, group).to(own.device), group.all_gather_along(own, -1))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        places = _places(ctx.part, ctx.group)
        own = ctx.group.reduce_scatter(dy.index_select(-1, places.to(dy.device)).contiguous(), -1)
        # Values that several ranks hold have their gradients added over them later.
        times = places.bincount()[ctx.part.index(ctx.group.rank, ctx.group.size, dy.shape[-1])]
        return (own if times.eq(1).all() else own / times.to(own)), None, None


def _places(part: DimShard, group: Group) -> Tensor:
    """Positions in the full dimension of the ranks' concatenated shards."""
    return torch.cat([part.index(rank, group.size, sum(part.widths)) for rank in range(group.size)])


def gather_parts(own: Tensor, part: DimShard, group: Group) -> Tensor:
    """The full activation, for ranks that each use their own shard of what is computed from it.

    Args:
        own: this rank's shard, ``[..., P]``.
        part: how the last dimension of the full activation, ``[..., W]``, is divided.
        group: the ranks.

    Collective: one all-gather over ``group``, and one reduce-scatter in the backward pass; every member must call it.
    """
    whole: Tensor = _Join.apply(own, part, group)  # type: ignore[no-untyped-call]  # torch
    return whole


def run_on_gathered(adapter: ModuleAdapter, module: nn.Module, part: DimShard, context: TensorParallelContext) -> None:
    """Let a module get gathered activations in place of this rank's shards, and return this rank's shard.

    Args:
        adapter: of the model.
        module: with full parameters; their gradients are sums over the ranks.
        part: how the last dimension of the activations is divided.
        context: of the model.
    """
    adapter.wrap(module, AdapterLayer.GATHERED_INPUTS, _run, part, context)


def _run(
    part: DimShard, context: TensorParallelContext, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    group, width = context.group, sum(part.widths)
    own = len(part.index(group.rank, group.size, width))

    def join(leaf: Any) -> Any:
        is_part = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[-1] == own
        return gather_parts(leaf, part, group) if is_part else leaf

    def take(leaf: Any) -> Any:
        is_whole = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[-1] == width
        return part.select(leaf, group.rank, group.size) if is_whole else leaf

    args, kwargs = pytree.tree_map(join, (args, kwargs))
    return pytree.tree_map(take, forward(*args, **kwargs))
