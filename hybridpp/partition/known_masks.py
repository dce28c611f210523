"""Indexing fake tensors by masks of inputs: the masks are real, so the shape of what is selected is known."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybridpp.nn.torch_private import FakeTensor, unwrapped

_INDEXED = frozenset((Tensor.__getitem__, Tensor.__setitem__))
_SELECTS = frozenset((torch.masked_select, Tensor.masked_select))
_REPEATS = frozenset((torch.repeat_interleave, Tensor.repeat_interleave))
# Of the second argument these read its metadata only, so what they make of an input has its values.
_LIKE: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    Tensor.expand_as: lambda tensor, other: tensor.expand(other.shape),
    Tensor.view_as: lambda tensor, other: tensor.view(other.shape),
    Tensor.reshape_as: lambda tensor, other: tensor.reshape(other.shape),
    Tensor.type_as: lambda tensor, other: tensor.to(other.dtype),
}


def run_with_known_masks(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func(*args, **kwargs)``, with real masks replaced by what gives fakes of the same shape.

    On fakes, the number of elements that a mask selects counts as unknown, although a mask of inputs is the same on
    every stage.
    """
    if func is Tensor.__format__ and _is_fake(args[0]) and args[0].dim() == 0:
        # As for a log: f"{x.std():.3f}".
        return format(math.nan if args[0].is_floating_point() else 0, args[1])
    if func in _INDEXED and len(args) > 1 and _is_fake(args[0]):
        return func(args[0], _without_masks(args[1]), *args[2:], **kwargs)
    if func in _LIKE and len(args) == 2 and not _is_fake(args[0]) and _is_fake(args[1]):
        return _LIKE[func](*args)
    if func in _SELECTS and len(args) == 2 and _is_fake(args[0]) and _is_mask(args[1]):
        shape = torch.Size(torch.broadcast_shapes(args[0].shape, args[1].shape))  # type: ignore[no-untyped-call]
        return args[0].expand(shape)[args[1].expand(shape).nonzero(as_tuple=True)]
    repeats = args[1] if func in _REPEATS and len(args) > 1 else None
    if isinstance(repeats, Tensor) and _is_fake(args[0]) and not _is_fake(repeats):
        return func(*args, **{"output_size": int(repeats.sum()), **kwargs})
    return func(*args, **kwargs)


def _is_fake(thing: Any) -> bool:
    return isinstance(thing, Tensor) and isinstance(unwrapped(thing), FakeTensor)


def _is_mask(thing: Any) -> bool:
    return isinstance(thing, Tensor) and thing.dtype in (torch.bool, torch.uint8) and not _is_fake(thing)


def _without_masks(index: Any) -> Any:
    """An index with the places of the elements in the place of each mask of inputs."""
    if _is_mask(index) and index.dim():
        return index.nonzero(as_tuple=True)
    if isinstance(index, tuple):
        parts: list[Any] = []
        for part in index:
            parts += part.nonzero(as_tuple=True) if _is_mask(part) and part.dim() else [part]
        return tuple(parts)
    return index
