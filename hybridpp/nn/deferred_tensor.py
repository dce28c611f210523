"""Tensors whose values are made only when they are read; here copies to a device and conversions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybridpp.nn.metadata_functions import METADATA_FUNCTIONS
from hybridpp.nn.torch_private import DisableTorchFunctionSubclass, make_wrapper_subclass, pytree
from hybridpp.nn.watcher import with_lost_weight

# Of a tensor with a gradient these are the values' own.
_OF_GRAPH = frozenset(getattr(Tensor, name).__get__ for name in ("grad_fn", "is_leaf"))
# What torch's functions take tensors in.
_CONTAINERS = (list, tuple, dict)


class MadeWhenRead(Tensor):
    """Any tensor whose values may not exist yet: only its shape, dtype and device are known without work.

    A function of it gets the values, a plain tensor, unless the class can answer without them. So results are right in
    any case.
    """

    def without_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function whose first argument this is, if it needs no values; else NotImplemented."""
        if func in METADATA_FUNCTIONS:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return NotImplemented

    def values_now(self) -> Tensor:
        """The values, made if they do not exist yet."""
        raise NotImplementedError

    def held(self) -> Tensor | None:
        """The plain tensor that stands for it without work: its values, or a part of them; None: there is none yet."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = with_lost_weight(func, kwargs or {})
        first = args[0] if args else None
        if isinstance(first, MadeWhenRead):
            result = first.without_values(func, args, kwargs)
            if result is not NotImplemented:
                return result
        if kwargs or any(isinstance(arg, _CONTAINERS) for arg in args):
            args, kwargs = with_values((args, kwargs))
            return func(*args, **kwargs)
        # Flattening a tree takes longer than most operations.
        return func(*[arg.values_now() if isinstance(arg, MadeWhenRead) else arg for arg in args])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a function of C there
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Below autograd: reached only around torch's functions (arguments of an autograd function).
        args, kwargs = pytree.tree_map_only(MadeWhenRead, lambda one: one.values_now().detach(), (args, kwargs or {}))
        return func(*args, **kwargs)


class DeferredTensor(MadeWhenRead):
    """A tensor whose values are made when an operation needs them.

    It has the shape, dtype and device of the values. Reading these makes nothing, and a conversion to another dtype is
    deferred, too; all other operations get the values, which are made once. A write goes to the values, which every
    later operation reads.
    """

    _make: Callable[[], Tensor] | None
    _made: Tensor | None

    def without_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._made is not None:
            return NotImplemented
        with DisableTorchFunctionSubclass():
            if func in METADATA_FUNCTIONS and not (func in _OF_GRAPH and self.requires_grad):
                return func(*args, **kwargs)
            if func is Tensor.to and len(args) == 2 and isinstance(args[1], torch.dtype) and not kwargs:
                return self if args[1] is self.dtype else _converted(self, args[1])
        return NotImplemented

    def values_now(self) -> Tensor:
        if self._made is None:
            assert self._make is not None
            with DisableTorchFunctionSubclass():
                wants_gradient = self.requires_grad
            # The first reader (a metric under no_grad) does not decide for the others.
            with torch.set_grad_enabled(wants_gradient):
                self._made, self._make = self._make(), None
        return self._made

    def held(self) -> Tensor | None:
        return self._made


def deferred(like: Tensor, make: Callable[[], Tensor], *, dtype: torch.dtype, device: torch.device) -> DeferredTensor:
    """A tensor that is made when it is read.

    Args:
        like: a plain, strided tensor of the same shape, strides and differentiability; or one that is made when it is
            read.
        make: makes the values; a function of ``like``, if that requires a gradient and gradients are enabled.
        dtype: of the values; if ``like`` requires a gradient, a conversion is all that may distinguish them.
        device: of the values.
    """
    if like.requires_grad and torch.is_grad_enabled():
        lazy: Any = _Present.apply(like, dtype, device)  # type: ignore[no-untyped-call]  # torch
    else:
        lazy = _wrapper(like, dtype, device)
    lazy._make, lazy._made = make, None
    return lazy  # type: ignore[no-any-return]  # a DeferredTensor


def with_values(tree: Any) -> Any:
    """``tree`` with the values of tensors that are made when they are read."""
    return pytree.tree_map_only(MadeWhenRead, lambda one: one.values_now(), tree)


def _converted(lazy: DeferredTensor, dtype: torch.dtype) -> Tensor:
    return deferred(lazy, lambda: lazy.values_now().to(dtype), dtype=dtype, device=lazy.device)


def _wrapper(like: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    # Strides of values that do not exist yet are not known.
    strides = None if isinstance(like, MadeWhenRead) else like.stride()
    return make_wrapper_subclass(DeferredTensor, like.shape, strides=strides, dtype=dtype, device=device)


class _Present(torch.autograd.Function):
    """Autograd's view of it, for autograd functions, which get the tensor itself."""

    @staticmethod
    def forward(ctx: Any, like: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        ctx.dtype = like.dtype
        return _wrapper(like, dtype, device)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return dy.to(ctx.dtype), None, None
