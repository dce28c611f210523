"""Replicated modules between sharded layers: norms over the width of all heads, which need the full activation."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hybridpp.cluster import Group
from hybridpp.module_adapter import AdapterLayer, ModuleAdapter
from hybridpp.nn.torch_private import has_no_data, pytree
from hybridpp.sharded_activations.collectives import linear_map
from hybridpp.sharding_plan.sharding_spec import DimShard
from hybridpp.tensor_parallel.tp_context import TensorParallelContext


def _positions(part: DimShard, group: Group) -> Tensor:
    """Positions in the full dimension of the ranks' concatenated shards."""
    return torch.cat([part.index(rank, group.size, sum(part.widths)) for rank in range(group.size)])


def gather_parts(local: Tensor, part: DimShard, group: Group) -> Tensor:
    """The full activation, for ranks that each use a shard of what is computed from it.

    Args:
        local: this rank's shard, ``[..., P]``.
        part: how the last dimension of the full activation, ``[..., W]``, is divided.
        group: the ranks.

    Collective: one all-gather over ``group``, and one reduce-scatter in the backward pass; every member must call it.
    """
    return linear_map(local, partial(_gathered, part=part, group=group), partial(_reduced, part=part, group=group))


def _gathered(local: Tensor, part: DimShard, group: Group) -> Tensor:
    full = local.new_empty((*local.shape[:-1], sum(part.widths)))
    if has_no_data(local):
        return full
    return full.index_copy_(-1, _positions(part, group).to(local.device), group.all_gather_along(local, -1))


def _reduced(dy: Tensor, part: DimShard, group: Group) -> Tensor:
    """This rank's shard of the sum of the ranks' gradients."""
    positions = _positions(part, group)
    local = group.reduce_scatter(dy.index_select(-1, positions.to(dy.device)).contiguous(), -1)
    # Values that several ranks hold have their gradients added over them later.
    num_holders = positions.bincount()[part.index(group.rank, group.size, dy.shape[-1])]
    return local if num_holders.eq(1).all() else local / num_holders.to(local)


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
    local_width = len(part.index(group.rank, group.size, width))

    def gather(leaf: Any) -> Any:
        is_part = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[-1] == local_width
        return gather_parts(leaf, part, group) if is_part else leaf

    def shard(leaf: Any) -> Any:
        is_full = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[-1] == width
        return part.select(leaf, group.rank, group.size) if is_full else leaf

    args, kwargs = pytree.tree_map(gather, (args, kwargs))
    return pytree.tree_map(shard, forward(*args, **kwargs))
