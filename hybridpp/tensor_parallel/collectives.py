"""Collectives that gradients flow back through: each forward with the backward that belongs to it.

Where an activation is *whole*, every rank of the group holds the same numbers; where it is *divided*, each holds its
part. While a model is traced its tensors are fake: shapes are worked out and nothing is communicated.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hybridpp.cluster import Group


def _nothing() -> None:
    return


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no numbers, because a model is being traced."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, meanwhile: Callable[[], None]) -> Tensor:
        ctx.group, ctx.meanwhile = group, meanwhile
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        # A copy: autograd may have handed the same tensor to somebody else.
        total = dy.clone(memory_format=torch.contiguous_format)
        work = ctx.group.all_reduce(total)
        ctx.meanwhile()
        work.wait()
        return total, None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return _summed(x.clone(), group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, width: int) -> Tensor:
        ctx.group, ctx.width = group, x.shape[-1]
        whole = x.repeat_interleave(group.size, -1) if is_fake(x) else group.all_gather_along(x, -1)
        return whole[..., :width].contiguous()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return own_part(dy, ctx.group, ctx.width), None, None


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, width: int) -> Tensor:
        ctx.group, ctx.whole = group, x.shape[-1]
        return own_part(x, group, width)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return gather_from_ranks(dy, ctx.group, ctx.whole), None, None


def copy_to_ranks(x: Tensor, group: Group, meanwhile: Callable[[], None] = _nothing) -> Tensor:
    """A whole activation for ranks that each make something else of it; their gradients are summed.

    Args:
        x: whole.
        group: the ranks.
        meanwhile: called while the gradients are being summed.

    Collective: one all-reduce over ``group`` in the backward pass; every member must run it.
    """
    if not x.requires_grad or not torch.is_grad_enabled():
        return x
    copied: Tensor = _Copy.apply(x, group, meanwhile)  # type: ignore[no-untyped-call]  # torch
    return copied


def sum_over_ranks(x: Tensor, group: Group) -> Tensor:
    """The sum of what the ranks hold, whole; ``x`` is used up: no one else may hold it.

    Collective: one all-reduce over ``group``; every member must call it.
    """
    if not x.requires_grad or not torch.is_grad_enabled():
        return _summed(x, group)
    total: Tensor = _Reduce.apply(x, group)  # type: ignore[no-untyped-call]  # torch
    return total


def _summed(x: Tensor, group: Group) -> Tensor:
    total = x.contiguous()
    if not is_fake(x):
        group.all_reduce(total).wait()
    return total


def gather_from_ranks(x: Tensor, group: Group, width: int) -> Tensor:
    """The ranks' parts of the last dimension side by side, whole.

    Args:
        x: this rank's part, ``[..., p]``; all ranks' are of one shape.
        group: the ranks.
        width: of the result; what the last ranks have beyond is filling.

    Collective: one all-gather over ``group``; every member must call it.
    """
    whole: Tensor = _Gather.apply(x, group, width)  # type: ignore[no-untyped-call]  # torch
    return whole


def own_part(whole: Tensor, group: Group, width: int) -> Tensor:
    """This rank's ``width`` columns of a whole tensor ``[..., V]``, filled up with zeros; contiguous."""
    start = min(group.rank * width, whole.shape[-1])
    part = whole[..., start : start + width]
    missing = width - part.shape[-1]
    return torch.nn.functional.pad(part, (0, missing)) if missing else part.contiguous()


def take_own_part(whole: Tensor, group: Group, width: int) -> Tensor:
    """The same of a tensor that wants a gradient: that is put together from the ranks'.

    Collective: one all-gather over ``group`` in the backward pass; every member must run it.
    """
    part: Tensor = _OwnPart.apply(whole, group, width)  # type: ignore[no-untyped-call]  # torch
    return part
