"""Activations with the full shape of which a rank holds a shard: gathered only where the full tensor is read."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from hybridpp.cluster import Group
from hybridpp.nn.deferred_tensor import MadeWhenRead
from hybridpp.nn.torch_private import (
    DisableTorchFunctionSubclass,
    backward_hooks_of,
    is_view,
    make_wrapper_subclass,
    pytree,
    storage_id,
    unsafe_view,
    version_or_none,
)
from hybridpp.sharded_activations.collectives import gather_from_ranks, linear_map, local_part, mapped, unchanged

_Replay = Callable[[Tensor], Tensor]


class DeferredGatherTensor(MadeWhenRead):
    """A full activation of which this rank holds a shard along one dimension.

    It has the full shape. Each subclass lists the operations that can be computed from shards; their results may be
    tensors of the same class. For all other operations it is gathered first, once, and they return plain tensors. So
    results are right in any case, also after a write to the full tensor or to a view of it.

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
    _full: Tensor | None
    _as_gathered: tuple[int, bool, bool] | None
    _gathered_from: int | None

    def without_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.is_sharded():
            return NotImplemented
        if func in self.kept:
            # A target that is read for the first time.
            others, named = map(_ready, args[1:]), {name: _ready(value) for name, value in kwargs.items()}
            result = self.kept[func](self, func, *others, **named)
            if result is not NotImplemented:
                return result
        return super().without_values(func, args, kwargs)

    def values_now(self) -> Tensor:
        return self.full_tensor()

    def held(self) -> Tensor:
        return self.local

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's is untyped
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, {self.group.size} parts)"

    def full_tensor(self) -> Tensor:
        """The full activation, plain. Collective at the first call: one all-gather."""
        if self._full is None or self._gathered_from != version_or_none(self.local):
            with DisableTorchFunctionSubclass():
                wants_gradient, is_inference = self.requires_grad, self.is_inference()
            # The first reader (a metric under no_grad) does not decide for later ones.
            with torch.inference_mode(is_inference), torch.set_grad_enabled(wants_gradient):
                if self.base is not None and self.replay is not None and self.has_gradient_of_local():
                    full: Tensor = self.replay(self.base.full_tensor())
                else:
                    full = self.gather_with_gradient()
            self._full, self._as_gathered, self._gathered_from = full, _state(full), version_or_none(self.local)
        return self._full

    def gather_with_gradient(self) -> Tensor:
        """The full activation with its gradient. Collective: one all-gather."""
        # For autograd this is the full tensor already.
        return linear_map(self, lambda _: self.gathered_values(), unchanged, unchanged)

    def gathered_values(self) -> Tensor:
        """The values of the full activation, in memory of its own. Collective: one all-gather."""
        return self.joined(self.local.detach(), self.group, self.divided, self.width)

    @classmethod
    def joined(cls, shard: Tensor, group: Group, dim: int, width: int) -> Tensor:
        """The full tensor of the ranks' shards, ``width`` wide along ``dim``. Collective: one all-gather."""
        full = gather_from_ranks(shard.movedim(dim, -1), group, width).movedim(-1, dim).contiguous()
        # A function's result that is a view cannot be written to in place.
        return unsafe_view(full, full.shape) if is_view(full) else full

    @classmethod
    def own(cls, full: Tensor, group: Group, dim: int, width: int) -> Tensor:
        """This rank's shard of a full tensor, ``width`` wide along ``dim``."""
        return local_part(full.movedim(dim, -1), group, width).movedim(-1, dim)

    def is_sharded(self) -> bool:
        """Whether the shard still has its values and its gradient."""
        if not self.has_gradient_of_local():
            return False
        link: DeferredGatherTensor | None = self
        while link is not None:
            # The full tensor may have been written to, or its gradient may be needed.
            if link._full is not None and (link._as_gathered is None or _state(link._full) != link._as_gathered):
                return False
            link = link.base
        return True

    def has_gradient_of_local(self) -> bool:
        # An autograd function that returns it (reentrant checkpointing does) makes its gradient that function's.
        with DisableTorchFunctionSubclass():
            return self.grad_fn is self._made_by


def _ready(value: Any) -> Any:
    """An argument with its values, if they are made when they are read."""
    if isinstance(value, tuple):
        return tuple(map(_ready, value))
    is_deferred = isinstance(value, MadeWhenRead) and not isinstance(value, DeferredGatherTensor)
    return value.values_now() if is_deferred else value


def _state(full: Tensor) -> tuple[int, bool, bool] | None:
    """A state that changes with what the shard does not show; None where versions are not counted."""
    version = version_or_none(full)
    return (
        None if version is None else (version, full.requires_grad, bool(backward_hooks_of(full)) or full.retains_grad)
    )


class _Present(torch.autograd.Function):
    """The deferred tensor in autograd: a full tensor, of whose gradient the shard gets this rank's shard."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, kind: type[DeferredGatherTensor], group: Group, dim: int, width: int
    ) -> Tensor:
        ctx.own = partial(kind.own, group=group, dim=dim, width=local.shape[dim])
        ctx.join = partial(kind.joined, group=group, dim=dim, width=width)
        shape = (*local.shape[:dim], width, *local.shape[dim + 1 :])
        lazy: Tensor = make_wrapper_subclass(kind, shape, dtype=local.dtype, device=local.device)
        return lazy

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        return mapped(dy, ctx.own, ctx.join), None, None, None, None


def deferred_gather(
    local: Tensor,
    group: Group,
    dim: int,
    width: int,
    base: DeferredGatherTensor | None = None,
    replay: _Replay | None = None,
    *,
    kind: type[DeferredGatherTensor],
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
    lazy.base, lazy.replay, lazy._full, lazy._as_gathered, lazy._gathered_from = base, replay, None, None, None
    with DisableTorchFunctionSubclass():
        lazy._made_by = lazy.grad_fn
    return lazy


def gathered(tree: Any) -> Any:
    """``tree`` with full, plain tensors. Collective: one all-gather for each deferred one."""
    return pytree.tree_map_only(DeferredGatherTensor, DeferredGatherTensor.full_tensor, tree)


def like(lazy: DeferredGatherTensor, local: Tensor, replay: _Replay, dim: int | None = None) -> DeferredGatherTensor:
    """The result ``local`` of an operation on the shard of ``lazy``, as a tensor of the same class.

    Args:
        lazy: the operation's argument.
        local: what it gives for the shard.
        replay: computes what it gives for the full tensor.
        dim: the sharded dimension of the result; None: as before.
    """
    if local is lazy.local:
        return lazy
    dim = lazy.divided if dim is None else dim
    # A view must see writes to the full tensor, and the full tensor writes to the view.
    if storage_id(local) == storage_id(lazy.local):
        return deferred_gather(local, lazy.group, dim, lazy.width, lazy, replay, kind=type(lazy))
    return deferred_gather(local, lazy.group, dim, lazy.width, kind=type(lazy))


def elementwise(lazy: DeferredGatherTensor, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Elementwise operations: conversions of dtype, arithmetic with numbers."""
    if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
        return NotImplemented
    local = func(lazy.local, *args, **kwargs)
    # On another device its group could not gather it.
    if local.device != lazy.local.device:
        return NotImplemented
    return like(lazy, local, lambda full: func(full, *args, **kwargs))
