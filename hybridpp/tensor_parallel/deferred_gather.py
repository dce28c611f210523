"""Sharded activations with the shape of the full ones: gathered only where all of one is needed."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from hybridpp.cluster import Group
from hybridpp.nn.torch_private import (
    VERSION,
    DisableTorchFunctionSubclass,
    backward_hooks_of,
    is_view,
    make_wrapper_subclass,
    pytree,
    storage_id,
    unsafe_view,
    version_or_none,
)
from hybridpp.tensor_parallel.collectives import copy_to_ranks, gather_from_ranks, local_part, scatter_to_ranks
from hybridpp.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

_Replay = Callable[[Tensor], Tensor]


class DeferredGatherTensor(Tensor):
    """A full activation of which this rank holds a shard along one dimension (logits, by vocabulary).

    Subclasses are sharded in another way and define what can be computed from shards.

    It has the full shape. Operations that do not read the sharded dimension (conversions, views, indices of the other
    dimensions, sums and products) give another one of its kind; the cross-entropy over it is computed from shards. For
    all other operations it is gathered first, once, and they give plain tensors. So results are right in any case, also
    after a write to the full tensor or to a view of it.

    Collective: every member of its group must do the same operations, because each may gather. Reading its shape, dtype
    or device and printing it do not.

    Attributes:
        local: this rank's shard, plain; of one width on all ranks, the last ones are padded.
        group: the ranks.
        divided: the sharded dimension.
        width: the full size of that dimension.
        base: the tensor of which this is a view; None: it has memory of its own.
        replay: computes this from the full tensor of ``base``.
        kept: what can be computed from shards, by torch's function: functions of this tensor, of torch's function, and
            of its other arguments.
    """

    local: Tensor
    group: Group
    divided: int
    width: int
    base: "DeferredGatherTensor | None"
    replay: _Replay | None
    kept: ClassVar[Mapping[Any, Callable[..., Any]]] = {}
    _made_by: Any
    _whole: Tensor | None
    _as_gathered: tuple[int, bool, bool] | None
    _gathered_from: int | None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, DeferredGatherTensor) and first.is_sharded():
            if func in first.kept:
                result = first.kept[func](first, func, *args[1:], **kwargs)
                if result is not NotImplemented:
                    return result
            if func in _ABOUT:
                with DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
        args, kwargs = gathered((args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a function of C there
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Below autograd: reached only around torch's functions (arguments of an autograd function).
        args, kwargs = pytree.tree_map_only(
            DeferredGatherTensor, lambda lazy: lazy.full_tensor().detach(), (args, kwargs or {})
        )
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's is untyped
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, {self.group.size} parts)"

    def full_tensor(self) -> Tensor:
        """The full activation, plain. Collective at the first call: one all-gather."""
        if self._whole is None or self._gathered_from != version_or_none(self.local):
            with DisableTorchFunctionSubclass():
                wants_gradient, is_inference = self.requires_grad, self.is_inference()
            # The first reader (a metric under no_grad) does not decide for the others.
            with torch.inference_mode(is_inference), torch.set_grad_enabled(wants_gradient):
                if self.base is not None and self.replay is not None and self.has_gradient_of_local():
                    whole: Tensor = self.replay(self.base.full_tensor())
                else:
                    whole = self.gather_with_gradient()
            self._whole, self._as_gathered, self._gathered_from = whole, _state(whole), version_or_none(self.local)
        return self._whole

    def gather_with_gradient(self) -> Tensor:
        """The full activation with its gradient. Collective: one all-gather."""
        whole: Tensor = _Gathered.apply(self)  # type: ignore[no-untyped-call]  # torch
        return whole

    def gathered_values(self) -> Tensor:
        """The values of the full activation, in memory of its own. Collective: one all-gather."""
        rows = self.local.detach().movedim(self.divided, -1)
        whole = gather_from_ranks(rows, self.group, self.width).movedim(-1, self.divided).contiguous()
        # A function's result that is a view cannot be written to in place.
        return unsafe_view(whole, whole.shape) if is_view(whole) else whole

    @classmethod
    def own(cls, whole: Tensor, group: Group, dim: int, width: int) -> Tensor:
        """This rank's shard of a full tensor, ``width`` wide along ``dim``."""
        return local_part(whole.movedim(dim, -1), group, width).movedim(-1, dim)

    def is_sharded(self) -> bool:
        """Whether the shard still has its values and its gradient."""
        if not self.has_gradient_of_local():
            return False
        link: DeferredGatherTensor | None = self
        while link is not None:
            # The full tensor may have been written to, or its gradient may be needed.
            if link._whole is not None and (link._as_gathered is None or _state(link._whole) != link._as_gathered):
                return False
            link = link.base
        return True

    def has_gradient_of_local(self) -> bool:
        # An autograd function that returns it (reentrant checkpointing does) makes its gradient that function's.
        with DisableTorchFunctionSubclass():
            return self.grad_fn is self._made_by


def _state(whole: Tensor) -> tuple[int, bool, bool] | None:
    """A state that changes with what the shard does not show; None where versions are not counted."""
    version = version_or_none(whole)
    return (
        None
        if version is None
        else (version, whole.requires_grad, bool(backward_hooks_of(whole)) or whole.retains_grad)
    )


class _Present(torch.autograd.Function):
    """Autograd's view of it: a full tensor; the shard's gradient is this rank's shard of its gradient."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, kind: type[DeferredGatherTensor], group: Group, dim: int, width: int
    ) -> Tensor:
        ctx.kind, ctx.group, ctx.dim, ctx.part = kind, group, dim, local.shape[dim]
        shape = (*local.shape[:dim], width, *local.shape[dim + 1 :])
        lazy: Tensor = make_wrapper_subclass(kind, shape, dtype=local.dtype, device=local.device)
        return lazy

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.kind.own(dy, ctx.group, ctx.dim, ctx.part), None, None, None, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lazy: DeferredGatherTensor) -> Tensor:
        return lazy.gathered_values()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


def deferred_gather(
    local: Tensor,
    group: Group,
    dim: int,
    width: int,
    base: DeferredGatherTensor | None = None,
    replay: _Replay | None = None,
    kind: type[DeferredGatherTensor] = DeferredGatherTensor,
) -> DeferredGatherTensor:
    """The ranks' shards as one activation.

    Args:
        local: this rank's shard; all ranks' have one shape.
        group: the ranks, in the order of the shards.
        dim: the sharded dimension, from 0.
        width: its full size; what exceeds it on the last ranks is padding.
        base: the tensor of which it is a view.
        replay: computes it from the full tensor of ``base``.
        kind: its class.
    """
    lazy: DeferredGatherTensor = _Present.apply(local, kind, group, dim, width)  # type: ignore[no-untyped-call]  # torch
    lazy.local, lazy.group, lazy.divided, lazy.width = local, group, dim, width
    lazy.base, lazy.replay, lazy._whole, lazy._as_gathered, lazy._gathered_from = base, replay, None, None, None
    with DisableTorchFunctionSubclass():
        lazy._made_by = lazy.grad_fn
    return lazy


def gathered(tree: Any) -> Any:
    """``tree`` with full, plain tensors. Collective: one all-gather for each deferred one."""
    return pytree.tree_map_only(DeferredGatherTensor, DeferredGatherTensor.full_tensor, tree)


def _like(lazy: DeferredGatherTensor, local: Tensor, replay: _Replay, dim: int | None = None) -> DeferredGatherTensor:
    """The result of an operation on the shard of ``lazy``."""
    if local is lazy.local:
        return lazy
    dim = lazy.divided if dim is None else dim
    # A view must see writes to the full tensor, and the other way round.
    if storage_id(local) == storage_id(lazy.local):
        return deferred_gather(local, lazy.group, dim, lazy.width, lazy, replay, type(lazy))
    return deferred_gather(local, lazy.group, dim, lazy.width, kind=type(lazy))


def elementwise(lazy: DeferredGatherTensor, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Elementwise operations: conversions of dtype, arithmetic with numbers."""
    if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
        return NotImplemented
    local = func(lazy.local, *args, **kwargs)
    # On another device its group could not gather it.
    if local.device != lazy.local.device:
        return NotImplemented
    return _like(lazy, local, lambda whole: func(whole, *args, **kwargs))


def _combined(lazy: DeferredGatherTensor, func: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
    """Sums and products; a tensor with one value per class (a bias, a mask) is sharded, too."""
    if not isinstance(other, Tensor):
        return elementwise(lazy, func, other, *args, **kwargs)
    sizes = zip(reversed(other.shape), reversed(lazy.shape), strict=False)
    fits = other.dim() <= lazy.dim() and all(size in (1, whole) for size, whole in sizes)
    if args or kwargs or type(other) not in (Tensor, nn.Parameter) or not fits or lazy.divided != lazy.dim() - 1:
        return NotImplemented
    if other.dim() and other.shape[-1] == lazy.width:
        own = scatter_to_ranks(other, lazy.group, lazy.local.shape[-1])
    else:
        own = copy_to_ranks(other, lazy.group)
    return _like(lazy, func(lazy.local, own), lambda whole: func(whole, other))


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
    return _like(lazy, local, lambda whole: func(whole, (*sizes[:-1], width)), local.dim() - 1)


def _flattened(lazy: DeferredGatherTensor, func: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    num_dims = lazy.dim()
    if lazy.divided != num_dims - 1 or end_dim % num_dims == num_dims - 1:
        return NotImplemented
    local = func(lazy.local, start_dim, end_dim)
    return _like(lazy, local, lambda whole: func(whole, start_dim, end_dim), local.dim() - 1)


def _transposed(lazy: DeferredGatherTensor, func: Any, dim0: int, dim1: int) -> Any:
    one, other = dim0 % lazy.dim(), dim1 % lazy.dim()
    dim = {one: other, other: one}.get(lazy.divided, lazy.divided)
    return _like(lazy, func(lazy.local, dim0, dim1), lambda whole: func(whole, dim0, dim1), dim)


def _permuted(lazy: DeferredGatherTensor, func: Any, *dims: Any) -> Any:
    order = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], list | tuple) else dims
    if not all(isinstance(dim, int) for dim in order) or len(order) != lazy.dim():
        return NotImplemented
    place = [dim % lazy.dim() for dim in order].index(lazy.divided)
    return _like(lazy, func(lazy.local, order), lambda whole: func(whole, order), place)


def _indexed(lazy: DeferredGatherTensor, func: Any, index: Any) -> Any:
    places = index if isinstance(index, tuple) else (index,)
    if lazy.divided != lazy.dim() - 1 or not all(map(_is_index, places)):
        return NotImplemented
    if any(place is Ellipsis for place in places):
        # After the dots, dimensions count from the end: only `[..., i, :]` does not touch the last one.
        leaves_last = places[-1] is Ellipsis or _is_all(places[-1])
    else:
        used = sum(place.dim() if _is_mask(place) else place is not None for place in places)
        leaves_last = used < lazy.dim() or (used == lazy.dim() and _is_all(places[-1]))
    if not leaves_last:
        return NotImplemented
    local = lazy.local[index]
    return _like(lazy, local, lambda whole: whole[index], local.dim() - 1)


def _is_index(place: Any) -> bool:
    # Lists of lists, arrays and so on have torch's own meaning.
    return place is None or place is Ellipsis or type(place) in (int, slice, Tensor)


def _is_mask(place: Any) -> bool:
    return isinstance(place, Tensor) and place.dtype in (torch.bool, torch.uint8)


def _is_all(place: Any) -> bool:
    return isinstance(place, slice) and place == slice(None)


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


# Known without a value.
_ABOUT = {
    Tensor.dim,
    Tensor.element_size,
    Tensor.is_complex,
    Tensor.is_floating_point,
    Tensor.is_inference,
    Tensor.nelement,
    Tensor.numel,
    Tensor.size,
    Tensor.__len__,
    *(
        getattr(Tensor, name).__get__
        for name in ("device", "dtype", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_nested", "is_sparse")
    ),
    *(getattr(Tensor, name).__get__ for name in ("itemsize", "layout", "ndim", "requires_grad", "shape")),
    VERSION.__get__,
}

DeferredGatherTensor.kept = {
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
