"""A layer whose backward pass computes only the input's gradient, and offers the weights' gradients to a queue."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from hybridpp.nn.torch_private import (
    accumulated_hooks_of,
    backward_hooks_of,
    function_of,
    is_functorch_active,
    is_view,
    parameters_of,
    unsafe_view,
)
from hybridpp.pipeline.split_backward_ops import SavedInput, SplitBackwardOps

_unsafe_view = unsafe_view


class WgradQueue(Protocol):
    """Decides when weight gradients are computed."""

    def save_input(self, ops: SplitBackwardOps, x: Tensor) -> tuple[Tensor, SavedInput | None]:
        """What to save of a layer's input, and a handle that restores the input; None: the input itself is saved."""

    def before(self, task: "WgradTask") -> None:
        """Called before a layer's input gradient is computed."""

    def try_defer(self, task: "WgradTask", overlap_comm: bool) -> bool:
        """Keep the task of a layer's weight gradients for later; False: the caller computes them now."""

    def try_add(self, task: "WgradTask") -> bool:
        """Add the weight's gradient to its sum in the kernel that computes it; False: the caller computes it now."""

    def add(self, tasks: list["WgradTask"]) -> None:
        """Compute weight gradients, and add them to the sums."""


class LayerBinding:
    """A layer of the model with its operations and its queue.

    Attributes:
        weight: the layer's own, whose sum has its name; None: it is not on this rank, or was not taken yet.
        bias: the layer's own; None: it has none.
        names: the parameter names: the weight's, then the bias's if there is one.
        is_deferrable: whether its weight gradients may be deferred in the current step.
        adds_products: whether its weight's gradients are added to their sum in the kernel that computes them.
    """

    __slots__ = ("__weakref__", "adds_products", "bias", "is_deferrable", "module", "names", "ops", "queue", "weight")

    def __init__(self, ops: SplitBackwardOps, module: nn.Module, names: tuple[str, ...], queue: WgradQueue):
        self.ops, self.module, self.names, self.queue = ops, module, names, queue
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.is_deferrable = self.adds_products = False

    def take_parameters(self) -> None:
        """Note which tensors are the layer's own, when the model has been cut: until then, others must be freed."""
        self.weight, self.bias = parameters_of(self.module).get("weight"), parameters_of(self.module).get("bias")

    def is_plain(self) -> bool:
        """Whether its parameters are on this rank, require gradients and have no gradient hooks of the user's."""
        weight, bias = self.weight, self.bias
        is_here = self.holds(parameters_of(self.module))
        return is_here and weight is not None and _is_plain(weight) and (bias is None or _is_plain(bias))

    def holds(self, parameters: Mapping[str, Tensor | None]) -> bool:
        """Whether a call runs with the layer's own tensors.

        It may put others in their place, of which autograd must compute the gradients: ``functional_call``, a hook that
        adds noise or a mask, a network that makes the weights.
        """
        return parameters.get("weight") is self.weight and parameters.get("bias") is self.bias


class WgradTask(NamedTuple):
    """The inputs of one weight-gradient computation: one call of one layer.

    Attributes:
        binding: of the layer.
        dy: the gradient of the output.
        x: the input, or the part of it that was saved.
        saved: restores the input from ``x``; None: ``x`` is the input.
    """

    binding: LayerBinding
    dy: Tensor
    x: Tensor
    saved: SavedInput | None

    def start(self) -> None:
        """Start to restore the input."""
        if self.saved is not None:
            self.saved.start(self.x)

    def input(self) -> Tensor:
        """The layer's input; :meth:`start` must have been called before."""
        return self.x if self.saved is None else self.saved.take()


class DeferredWgradFunction(torch.autograd.Function):
    """A layer's forward. Its backward leaves the weights' gradients to the queue, if the queue defers them."""

    @staticmethod
    def forward(ctx: Any, binding: LayerBinding, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.binding = binding
        saved, ctx.saved = binding.queue.save_input(binding.ops, x)
        ctx.save_for_backward(saved, weight)
        output = binding.ops.forward(binding.module, x, weight, bias)
        # Autograd forbids in-place writes to a view that was made in here (`embeddings += positions` is such a write).
        # The unsafe view shares the memory but is no view to autograd; nothing else refers to its base.
        return _unsafe_view(output, output.shape) if is_view(output) else output

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, Tensor | None, Tensor | None]:
        binding: LayerBinding = ctx.binding
        ops, module = binding.ops, binding.module
        x, weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            return None, *DeferredWgradFunction._recorded_backward(ctx, dy, x, weight)
        task = WgradTask(binding, dy if ops.pre_grad is None else ops.pre_grad(dy, x), x, ctx.saved)
        binding.queue.before(task)
        dx = ops.input_gradient(module, task.dy, x, weight) if ctx.needs_input_grad[1] else None
        if binding.queue.try_defer(task, ops.overlap_comm and dx is not None):
            return None, dx, None, None
        task.start()
        if binding.adds_products and binding.queue.try_add(task):
            return None, dx, None, None
        return None, dx, *ops.weight_gradients(module, task.dy, task.input(), weight, ctx.needs_input_grad[3])

    @staticmethod
    def _recorded_backward(
        ctx: Any, dy: Tensor, x: Tensor, weight: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """All gradients at once, of which autograd records how they were computed (``create_graph=True``)."""
        ops, module = ctx.binding.ops, ctx.binding.module
        dy = dy if ops.pre_grad is None else ops.pre_grad(dy, x)
        dx = ops.input_gradient(module, dy, x, weight) if ctx.needs_input_grad[1] else None
        x = x if ctx.saved is None else ctx.saved.with_gradient(x)
        return dx, *ops.weight_gradients(module, dy, x, weight, ctx.needs_input_grad[3])


def is_deferred_layer(node: Any) -> bool:
    """Whether a node of autograd's graph is the call of a layer by :func:`deferred_wgrad`."""
    return isinstance(node, BackwardCFunction) and function_of(type(node)) is DeferredWgradFunction


def deferred_wgrad(binding: LayerBinding, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Run a layer through :class:`DeferredWgradFunction`."""
    if is_functorch_active():
        output: Tensor = DeferredWgradFunction.apply(binding, x, weight, bias)  # type: ignore[no-untyped-call]  # torch
        return output
    # What `apply` does without functorch, at a fraction of its Python overhead.
    direct: Tensor = super(torch.autograd.Function, DeferredWgradFunction).apply(binding, x, weight, bias)  # type: ignore[no-untyped-call]
    return direct


def _is_plain(parameter: Tensor) -> bool:
    return (
        parameter.requires_grad
        and not backward_hooks_of(parameter)
        # One is hybridpp's own.
        and len(accumulated_hooks_of(parameter) or ()) <= 1
    )
