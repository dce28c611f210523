"""Whole modules between divided layers: norms over the width of all heads, which no rank can compute from its part."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hybridpp.cluster import Group
from hybridpp.tensor_parallel.collectives import is_fake
from hybridpp.tensor_parallel.crossings import Crossings
from hybridpp.tensor_parallel.division import Part


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, part: Part, group: Group) -> Tensor:
        ctx.part, ctx.group = part, group
        whole = own.new_empty((*own.shape[:-1], sum(part.widths)))
        if is_fake(own):
            return whole
        return whole.index_copy_(-1, _places(part, group).to(own.device), group.all_gather_along(own, -1))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        places = _places(ctx.part, ctx.group)
        own = ctx.group.reduce_scatter(dy.index_select(-1, places.to(dy.device)).contiguous(), -1)
        # What several ranks have the same of has its gradient added up over them later.
        times = places.bincount()[ctx.part.index(ctx.group.rank, ctx.group.size, dy.shape[-1])]
        return (own if times.eq(1).all() else own / times.to(own)), None, None


def _places(part: Part, group: Group) -> Tensor:
    """Where what the ranks have, side by side, lies in the whole."""
    return torch.cat([part.index(rank, group.size, sum(part.widths)) for rank in range(group.size)])


def join_parts(own: Tensor, part: Part, group: Group) -> Tensor:
    """The ranks' parts of the last dimension in their places, for ranks that each use another part of what they make.

    Args:
        own: this rank's part, ``[..., P]``.
        part: of the last dimension of the whole, ``[..., W]``.
        group: the ranks.

    Collective: one all-gather over ``group``, and one reduce-scatter in the backward pass; every member must call it.
    """
    whole: Tensor = _Join.apply(own, part, group)  # type: ignore[no-untyped-call]  # torch
    return whole


def run_on_whole(module: nn.Module, part: Part, crossings: Crossings) -> None:
    """Let a module that is given this rank's part of activations see them whole, and return this rank's part.

    Only the instance attribute ``forward`` is set.

    Args:
        module: with all of its parameters; their gradients are to be summed over the ranks.
        part: of the last dimension.
        crossings: of the model.
    """
    # functools.partial and no closure, so that the model can still be copied.
    module.forward = functools.partial(_run, part, crossings, module.forward)


def _run(part: Part, crossings: Crossings, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    group, width = crossings.group, sum(part.widths)
    own = len(part.index(group.rank, group.size, width))

    def join(leaf: Any) -> Any:
        is_part = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[-1] == own
        return join_parts(leaf, part, group) if is_part else leaf

    def take(leaf: Any) -> Any:
        is_whole = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[-1] == width
        return part.of(leaf, group.rank, group.size) if is_whole else leaf

    args, kwargs = pytree.tree_map(join, (args, kwargs))
    return pytree.tree_map(take, forward(*args, **kwargs))
