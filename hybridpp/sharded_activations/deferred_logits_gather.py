"""Logits that are sharded by vocabulary, with the shape of the full ones: losses are computed from the shards."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hybridpp.sharded_activations.collectives import copy_to_ranks, scatter_to_ranks
from hybridpp.sharded_activations.cross_entropy import vocab_parallel_cross_entropy
from hybridpp.sharded_activations.deferred_gather import DeferredGatherTensor, elementwise, like


class DeferredLogitsTensor(DeferredGatherTensor):
    """Full logits of which this rank holds some classes.

    Operations that do not read the classes (conversions, views, indices of the other dimensions, sums and products)
    keep them sharded, and the cross-entropy over them is computed from shards. Anything else gathers them first.
    """


def _combined(lazy: DeferredGatherTensor, func: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
    """Sums and products; a tensor with one value per class (a bias, a mask) is sharded, too."""
    if not isinstance(other, Tensor):
        return elementwise(lazy, func, other, *args, **kwargs)
    sizes = zip(reversed(other.shape), reversed(lazy.shape), strict=False)
    fits = other.dim() <= lazy.dim() and all(size in (1, full_size) for size, full_size in sizes)
    if args or kwargs or type(other) not in (Tensor, nn.Parameter) or not fits or lazy.divided != lazy.dim() - 1:
        return NotImplemented
    if other.dim() and other.shape[-1] == lazy.width:
        local_other = scatter_to_ranks(other, lazy.group, lazy.local.shape[-1])
    else:
        local_other = copy_to_ranks(other, lazy.group)
    return like(lazy, func(lazy.local, local_other), lambda full: func(full, other))


def _reshaped(lazy: DeferredGatherTensor, func: Any, *sizes: Any, **kwargs: Any) -> Any:
    if len(sizes) == 1 and isinstance(sizes[0], list | tuple):
        sizes = tuple(sizes[0])
    if kwargs or not sizes or not all(isinstance(size, int) for size in sizes) or lazy.divided != lazy.dim() - 1:
        return NotImplemented
    width, others = lazy.width, lazy.shape[:-1].numel()
    others_stay = others > 0 and torch.Size(sizes[:-1]).numel() == others
    if sizes[-1] != width and not (sizes[-1] == -1 and others_stay):
        return NotImplemented
    local = func(lazy.local, (*sizes[:-1], lazy.local.shape[-1]))
    return like(lazy, local, lambda full: func(full, (*sizes[:-1], width)), local.dim() - 1)


def _flattened(lazy: DeferredGatherTensor, func: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    num_dims = lazy.dim()
    if lazy.divided != num_dims - 1 or end_dim % num_dims == num_dims - 1:
        return NotImplemented
    local = func(lazy.local, start_dim, end_dim)
    return like(lazy, local, lambda full: func(full, start_dim, end_dim), local.dim() - 1)


def _transposed(lazy: DeferredGatherTensor, func: Any, dim0: int, dim1: int) -> Any:
    first, second = dim0 % lazy.dim(), dim1 % lazy.dim()
    dim = {first: second, second: first}.get(lazy.divided, lazy.divided)
    return like(lazy, func(lazy.local, dim0, dim1), lambda full: func(full, dim0, dim1), dim)


def _permuted(lazy: DeferredGatherTensor, func: Any, *dims: Any) -> Any:
    order = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], list | tuple) else dims
    if not all(isinstance(dim, int) for dim in order) or len(order) != lazy.dim():
        return NotImplemented
    divided = [dim % lazy.dim() for dim in order].index(lazy.divided)
    return like(lazy, func(lazy.local, order), lambda full: func(full, order), divided)


def _indexed(lazy: DeferredGatherTensor, func: Any, index: Any) -> Any:
    indices = index if isinstance(index, tuple) else (index,)
    if lazy.divided != lazy.dim() - 1 or not all(map(_is_index, indices)):
        return NotImplemented
    if any(item is Ellipsis for item in indices):
        # After the dots, dimensions count from the end: only `[..., i, :]` does not touch the last one.
        leaves_last = indices[-1] is Ellipsis or _is_all(indices[-1])
    else:
        used = sum(item.dim() if _is_mask(item) else item is not None for item in indices)
        leaves_last = used < lazy.dim() or (used == lazy.dim() and _is_all(indices[-1]))
    if not leaves_last:
        return NotImplemented
    local = lazy.local[index]
    return like(lazy, local, lambda full: full[index], local.dim() - 1)


def _is_index(item: Any) -> bool:
    # Lists of lists, arrays and so on have torch's own meaning.
    return item is None or item is Ellipsis or type(item) in (int, slice, Tensor)


def _is_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8)


def _is_all(item: Any) -> bool:
    return isinstance(item, slice) and item == slice(None)


def _cross_entropy(
    lazy: DeferredGatherTensor,
    func: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: Any = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    by_class = type(target) is Tensor and not target.is_floating_point() and lazy.divided == min(lazy.dim() - 1, 1)
    fits = by_class and target.shape == lazy.shape[: lazy.divided] + lazy.shape[lazy.divided + 1 :]
    if not fits or weight is not None or size_average is not None or reduce is not None:
        return NotImplemented
    # Autocast computes losses in fp32.
    local = lazy.local.float() if torch.is_autocast_enabled(lazy.local.device.type) else lazy.local
    return vocab_parallel_cross_entropy(
        local,
        target,
        lazy.group,
        lazy.width,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


DeferredLogitsTensor.kept = {
    functional.cross_entropy: _cross_entropy,
    Tensor.__getitem__: _indexed,
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _reshaped),
    **dict.fromkeys((Tensor.flatten, torch.flatten), _flattened),
    **dict.fromkeys((Tensor.transpose, torch.transpose), _transposed),
    **dict.fromkeys((Tensor.permute, torch.permute), _permuted),
    **dict.fromkeys((Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to), elementwise),
    **dict.fromkeys((Tensor.contiguous, Tensor.detach, torch.detach, Tensor.tanh, torch.tanh), elementwise),
    **dict.fromkeys((Tensor.mul, torch.mul, Tensor.__mul__, Tensor.__rmul__), _combined),
    **dict.fromkeys((Tensor.add, torch.add, Tensor.__add__, Tensor.__radd__), _combined),
    **dict.fromkeys((Tensor.sub, torch.sub, Tensor.__sub__), _combined),
    # With a tensor, the padding would become NaN.
    **dict.fromkeys((Tensor.div, torch.div, Tensor.__truediv__), elementwise),
}
