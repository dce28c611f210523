"""Collectives with gradients: each forward with its backward.

A *replicated* activation has the same values on every rank of the group; of a *sharded* one each rank holds a shard.
While a model is traced its tensors are fake: shapes are computed and nothing is communicated.

All of them are linear, and the gradient of each is another of them: a sum's is a copy, a gather's a shard, and the
other way round. So gradients of gradients (``create_graph=True``) communicate as well.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from hybridpp.cluster import Group
from hybridpp.nn.torch_private import function_of, has_no_data

_Map: TypeAlias = Callable[[Tensor], Tensor]
_PACKAGE = __name__.rpartition(".")[0]


def _nothing() -> None:
    return


class _LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: _Map, backward: _Map, again: _Map) -> Tensor:
        ctx.backward, ctx.again = backward, again
        return function(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return mapped(dy, ctx.backward, ctx.again), None, None, None


def linear_map(x: Tensor, function: _Map, backward: _Map, again: _Map | None = None) -> Tensor:
    """A linear function of a tensor, whose gradient goes through another function, and that one's through it.

    Args:
        x: its argument.
        function: gives the result.
        backward: gives the gradient of ``x`` from the gradient of the result.
        again: does what ``function`` does for any argument, if that knows the result beforehand; it is used for
            gradients of gradients. None: ``function``.
    """
    result: Tensor = _LinearMap.apply(x, function, backward, again or function)  # type: ignore[no-untyped-call]  # torch
    return result


def is_collective(node: Any) -> bool:
    """Whether a node of autograd's graph is one of this package's functions, which join what ranks have of a tensor."""
    return isinstance(node, BackwardCFunction) and function_of(type(node)).__module__.startswith(_PACKAGE)


def mapped(x: Tensor, function: _Map, backward: _Map) -> Tensor:
    """:func:`linear_map`, where autograd records it: in backward passes with ``create_graph=True``."""
    return linear_map(x, function, backward) if x.requires_grad and torch.is_grad_enabled() else function(x)


def unchanged(dy: Tensor) -> Tensor:
    """A backward function where the gradient of the result is that of the argument, as of a sum over ranks."""
    return dy


def copy_to_ranks(x: Tensor, group: Group, overlap_fn: Callable[[], None] = _nothing) -> Tensor:
    """A replicated activation for ranks that each compute something else with it; its gradients are all-reduced.

    Args:
        x: replicated.
        group: the ranks.
        overlap_fn: called while the gradients are being all-reduced.

    Collective: one all-reduce over ``group`` in the backward pass; every member must run it.
    """
    if not x.requires_grad or not torch.is_grad_enabled():
        return x

    def summed(dy: Tensor) -> Tensor:
        # A copy: autograd may have given the same tensor to others.
        total = dy.clone(memory_format=torch.contiguous_format)
        work = group.all_reduce(total)
        overlap_fn()
        work.wait()
        return total

    return linear_map(x, unchanged, summed)


def sum_over_ranks(x: Tensor, group: Group) -> Tensor:
    """The sum of the ranks' tensors, replicated; ``x`` is overwritten, so nothing else may hold it.

    Collective: one all-reduce over ``group``; every member must call it.
    """
    if not x.requires_grad or not torch.is_grad_enabled():
        return _summed(x, group)
    return linear_map(x, lambda local: _summed(local.clone(), group), unchanged)


def _summed(x: Tensor, group: Group) -> Tensor:
    total = x.contiguous()
    if not has_no_data(x):
        group.all_reduce(total).wait()
    return total


def gather_from_ranks(x: Tensor, group: Group, width: int) -> Tensor:
    """The ranks' shards of the last dimension, concatenated and replicated.

    Args:
        x: this rank's shard, ``[..., p]``; all ranks' have one shape.
        group: the ranks.
        width: of the result; what exceeds it is padding.

    Collective: one all-gather over ``group``; every member must call it.
    """
    shard = partial(local_part, group=group, width=x.shape[-1])
    return linear_map(x, partial(_gathered, group=group, width=width), shard)


def _gathered(x: Tensor, group: Group, width: int) -> Tensor:
    full = x.repeat_interleave(group.size, -1) if has_no_data(x) else group.all_gather_along(x, -1)
    return full[..., :width].contiguous()


def local_part(full: Tensor, group: Group, width: int) -> Tensor:
    """This rank's ``width`` columns of a full tensor ``[..., V]``, padded with zeros; contiguous."""
    start = min(group.rank * width, full.shape[-1])
    part = full[..., start : start + width]
    missing = width - part.shape[-1]
    return torch.nn.functional.pad(part, (0, missing)) if missing else part.contiguous()


def scatter_to_ranks(full: Tensor, group: Group, width: int) -> Tensor:
    """This rank's columns of a replicated tensor that requires a gradient, which is gathered.

    Collective: one all-gather over ``group`` in the backward pass; every member must run it.
    """
    gather = partial(_gathered, group=group, width=full.shape[-1])
    return linear_map(full, partial(local_part, group=group, width=width), gather)
