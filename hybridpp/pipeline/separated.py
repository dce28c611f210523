"""A layer whose backward pass goes back to its input only: what its weights' gradients are made of goes to an owner."""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from hybridpp.pipeline.layers import Kept, Layer

_unsafe_view = torch.ops.aten._unsafe_view.default


class Owner(Protocol):
    """Decides when weight gradients are computed."""

    def keep(self, layer: Layer, x: Tensor) -> tuple[Tensor, Kept | None]:
        """What is kept of a layer's input, and how to have the input again (None: that is it)."""

    def before(self, note: "Note") -> None:
        """A layer's input gradient is computed next."""

    def takes(self, note: "Note", may_wait: bool) -> bool:
        """Remember what the gradients of a layer's weights are made of; False if autograd shall compute them."""


class Call:
    """A layer of the model.

    Attributes:
        names: its weight's, then its bias's if it has one.
        may_be_apart: whether its weight's gradient may be kept apart in the step that runs.
    """

    __slots__ = ("layer", "may_be_apart", "module", "names", "owner")

    def __init__(self, layer: Layer, module: nn.Module, names: tuple[str, ...], owner: Owner):
        self.layer, self.module, self.names, self.owner = layer, module, names, owner
        self.may_be_apart = False

    def is_plain(self) -> bool:
        """Whether its parameters are here, want gradients, and nobody looks at how those come to be."""
        parameters = self.module._parameters
        weight, bias = parameters.get("weight"), parameters.get("bias")
        return weight is not None and _is_plain(weight) and (bias is None or _is_plain(bias))


class Note(NamedTuple):
    """What the gradients of a layer's weights are made of, for one of its calls.

    Attributes:
        call: of the layer.
        dy: the gradient of its output.
        x: its input, or what is kept of that.
        kept: how to have the input; None: ``x`` is it.
    """

    call: Call
    dy: Tensor
    x: Tensor
    kept: Kept | None

    def start(self) -> None:
        """Begin to get the input."""
        if self.kept is not None:
            self.kept.start(self.x)

    def input(self) -> Tensor:
        """The layer's input; :meth:`start` was called before."""
        return self.x if self.kept is None else self.kept.take()


class Separated(torch.autograd.Function):
    """A layer's forward; its backward gives the weights' gradients to the owner, if that takes them."""

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.call = call
        saved, ctx.kept = call.owner.keep(call.layer, x)
        ctx.save_for_backward(saved, weight)
        output = call.layer.forward(call.module, x, weight, bias)
        # Autograd refuses to let a view be written to that was made in here (`embeddings += positions` does that). This
        # is the same memory, but no view to autograd; nobody else holds its base.
        return _unsafe_view(output, output.shape) if output._is_view() else output

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, Tensor | None, Tensor | None]:
        call: Call = ctx.call
        layer, module = call.layer, call.module
        x, weight = ctx.saved_tensors
        note = Note(call, dy if layer.arrive is None else layer.arrive(dy, x), x, ctx.kept)
        call.owner.before(note)
        dx = layer.input_gradient(module, note.dy, x, weight) if ctx.needs_input_grad[1] else None
        if call.owner.takes(note, layer.may_wait and dx is not None):
            return None, dx, None, None
        note.start()
        return None, dx, *layer.weight_gradients(module, note.dy, note.input(), weight, ctx.needs_input_grad[3])


def separated(call: Call, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Run a layer so that its owner is asked in the backward pass."""
    if torch._C._are_functorch_transforms_active():
        output: Tensor = Separated.apply(call, x, weight, bias)  # type: ignore[no-untyped-call]  # torch
        return output
    # What `apply` comes to without functorch: it costs more Python there than all of this file.
    direct: Tensor = super(torch.autograd.Function, Separated).apply(call, x, weight, bias)  # type: ignore[no-untyped-call]
    return direct


def _is_plain(parameter: Tensor) -> bool:
    return (
        parameter.requires_grad
        and not parameter._backward_hooks
        # One is hybridpp's own.
        and len(parameter._post_accumulate_grad_hooks or ()) <= 1
    )
