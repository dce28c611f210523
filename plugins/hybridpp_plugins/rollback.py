"""Restore a model and its optimizer if boost fails midway."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hybridpp.checkpoint import swap_value, without_flat_weights
from hybridpp.module_adapter import ModuleAdapter
from hybridpp.nn import walk
from hybridpp.nn.contents import is_container
from hybridpp.nn.snapshot import Holder, Snapshot
from hybridpp.nn.torch_private import accumulated_hooks_of, drop_accumulated_hooks
from hybridpp_plugins.engine_handle import ENGINE, FailedBoost

UNUSABLE = (
    "boost of this model failed after the model was sharded, or cut into stages: it no longer holds all its "
    "parameters. Make the model and its optimizer anew before the next booster.boost."
)


@contextmanager
def undone_on_failure(model: nn.Module, optimizer: Optimizer | None) -> Iterator["Rollback"]:
    """Restore the model and the optimizer if the code inside fails; if that is impossible, add a note to the error.

    A model that cannot be restored is marked, so that boost refuses it.
    """
    rollback = Rollback(model, optimizer)
    try:
        yield rollback
    except BaseException as error:
        if rollback.is_possible:
            rollback.put_back()
        else:
            ModuleAdapter(model).set_attribute(model, ENGINE, FailedBoost(), "mark of a boost that failed")
            error.add_note(f"hybridpp: {UNUSABLE}")
        raise
    rollback.forget()


class Rollback:
    """The state of a model and an optimizer before boost.

    It holds the contents of containers and references to the values of tensors: no value is copied, and the memory of
    those that boost casts or moves is held until boost ends.

    Args:
        model: as the script made it.
        optimizer: the user's, or None.

    Attributes:
        is_possible: whether :meth:`put_back` can restore it.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None):
        tensors = {id(tensor): tensor for tensor in (*walk.parameters(model), *walk.buffers(model))}
        self._empty = [
            m for m in walk.modules(model) if isinstance(m, nn.RNNBase) and any(p.is_meta for p in walk.parameters(m))
        ]
        held = [] if not isinstance(optimizer, Optimizer) else _of_optimizer(optimizer)
        # With weak references in it, no memory could be allocated for the weights.
        with without_flat_weights(self._empty):
            modules = Snapshot.of_modules(model)
        self._snapshots = [modules, Snapshot((holder, holder.read(holder.thing)) for holder in held)]
        self._tensors = [_TensorState.of(tensor) for tensor in tensors.values()]
        self.is_possible = True

    def forget(self) -> None:
        """Drop the state: boost is done, or this rank is about to free what other ranks will hold."""
        self._snapshots.clear()
        self._tensors.clear()
        self._empty.clear()
        self.is_possible = False

    def put_back(self) -> None:
        """Restore the model and the optimizer."""
        for snapshot in self._snapshots:
            snapshot.restore()
        with without_flat_weights(self._empty):
            for tensor in self._tensors:
                tensor.put_back()


class _TensorState(NamedTuple):
    """A parameter or a buffer.

    Attributes:
        tensor: the object.
        value: what it refers to.
        requires_grad: as it is.
        grad: its gradient, and what that refers to.
        attributes: of the object.
        hooks: on its gradient, after that is accumulated; and what the dict of these holds.
    """

    tensor: Tensor
    value: Tensor
    requires_grad: bool
    grad: tuple[Tensor, Tensor] | None
    attributes: dict[str, Any]
    hooks: tuple[dict[int, Any], dict[int, Any]] | None

    @classmethod
    def of(cls, tensor: Tensor) -> "_TensorState":
        hooks = accumulated_hooks_of(tensor)
        return cls(
            tensor,
            tensor if is_lazy(tensor) else tensor.data,
            tensor.requires_grad,
            None if tensor.grad is None else (tensor.grad, tensor.grad.data),
            dict(vars(tensor)),
            None if hooks is None else (hooks, dict(hooks)),
        )

    @property
    def is_swapped(self) -> bool:
        """Whether memory was allocated for it, which the meta device has none of."""
        return self.tensor.is_meta is not self.value.is_meta

    def put_back(self) -> None:
        if self.is_swapped:
            swap_value(self.tensor, self.value)
        elif self.value is not self.tensor:
            self.tensor.data = self.value
        if self.tensor.requires_grad is not self.requires_grad:
            self.tensor.requires_grad_(self.requires_grad)
        if self.grad is None:
            self.tensor.grad = None
        else:
            self.grad[0].data = self.grad[1]
            self.tensor.grad = self.grad[0]
        Holder.of_attributes(self.tensor).put(self.tensor, self.attributes)
        if self.hooks is not None:
            Holder.of_items(self.hooks[0]).put(*self.hooks)
        elif accumulated_hooks_of(self.tensor) is not None:
            drop_accumulated_hooks(self.tensor)


def _of_optimizer(optimizer: Optimizer) -> list[Holder]:
    """Its attributes, its groups, the lists of those, and the containers beside them."""
    attributes = vars(optimizer)
    groups = [container for group in optimizer.param_groups for container in (group, *group.values())]
    return [Holder.of_items(thing) for thing in (attributes, *attributes.values(), *groups) if is_container(thing)]
