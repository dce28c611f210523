"""Weight gradients apart from the rest of the backward pass: at once, or when a schedule says so.

Most of a model's weights are in a few kinds of layers. While a schedule runs, those are called through an autograd
function that goes back to the input only, and notes what the weight's gradient is made of (Qi et al. 2023,
arXiv:2401.10241, split the pass the same way). The gradient is computed there and then, or the note waits for the
schedule's W action; both use the same kernels in the same order, and add to the accumulated gradient in place.
Everything else computes its gradients as ever, in the pass that goes back to the input.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from hybridpp.pipeline.layers import Layer, layer_of


class Accumulated(Protocol):
    """Where gradients add up."""

    @property
    def gradients(self) -> Mapping[str, Tensor]:
        """The sums so far, by the parameter's name."""

    def postpone(self, name: str) -> None:
        """A part of this gradient follows after the pass that goes back to the input."""

    def reached(self, name: str, final: bool) -> None:
        """A part was added; where ``final``, the last of this step."""


class _Call(NamedTuple):
    """A layer of the model."""

    layer: Layer
    module: nn.Module
    weight: str
    bias: str | None
    owner: "WeightGradients"


class Note(NamedTuple):
    """What the gradients of a layer's weights are made of, for one of its calls."""

    call: _Call
    dy: Tensor
    x: Tensor

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names."""
        return (self.call.weight,) if self.call.bias is None else (self.call.weight, self.call.bias)


class _Mode(Enum):
    AS_EVER = auto()
    AT_ONCE = auto()
    LATER = auto()


class _Separated(torch.autograd.Function):
    """A layer's forward; its backward gives the weights' gradients to the owner, if that takes them."""

    @staticmethod
    def forward(ctx: Any, call: _Call, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(x, weight)
        return call.layer.forward(call.module, x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, Tensor | None, Tensor | None]:
        call: _Call = ctx.call
        x, weight = ctx.saved_tensors
        dx = call.layer.input_gradient(call.module, dy, x, weight) if ctx.needs_input_grad[1] else None
        if call.owner.takes(Note(call, dy, x)):
            return None, dx, None, None
        dw = call.layer.weight_gradient(call.module, dy, x, weight, None)
        return None, dx, dw, call.layer.bias_gradient(dy, dy.dtype) if ctx.needs_input_grad[3] else None


class WeightGradients:
    """Runs those layers of a model whose weight gradients can be told apart.

    The modules keep their classes and attributes; only the instance attribute ``forward`` is set. Outside of
    :meth:`recorded` they run as ever.

    Args:
        model: before it is cut, so that whatever intercepts its modules finds these forwards.

    Attributes:
        separable: the parameters whose gradients can be told apart.
    """

    def __init__(self, model: nn.Module):
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._accumulated: Accumulated | None = None
        self._recording = False
        self._mode = _Mode.AS_EVER
        self._notes: list[Note] = []
        self._pass_id: int | None = None
        separable: set[str] = set()
        for module in model.modules():
            layer = layer_of(module)
            if layer is None:
                continue
            weight, bias = module._parameters["weight"], module._parameters.get("bias")
            call = _Call(layer, module, names[id(weight)], None if bias is None else names[id(bias)], self)
            separable.update(name for name in (call.weight, call.bias) if name is not None)
            # functools.partial and no closure, so that the model can still be copied.
            module.forward = functools.partial(self._run, call, module.forward)
        self.separable = frozenset(separable)

    def __deepcopy__(self, memo: dict[int, Any]) -> "WeightGradients":
        """A copy of a boosted model (an average of its weights, say) is no boosted model: its layers run as ever."""
        return WeightGradients(nn.Module())

    def connect(self, accumulated: Accumulated) -> None:
        """Say where gradients add up; without, everything runs as ever."""
        self._accumulated = accumulated

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Around a forward pass of training, so that its backward pass can leave weight gradients for later."""
        self._recording = self._accumulated is not None
        try:
            yield
        finally:
            self._recording = False

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Around a backward pass that computes everything."""
        with self._during(_Mode.AT_ONCE):
            yield

    @contextmanager
    def later(self) -> Iterator[list[Note]]:
        """Around a backward pass that leaves weight gradients to :meth:`add`, in the list that the block gets."""
        notes: list[Note] = []
        self._notes = notes
        with self._during(_Mode.LATER):
            yield notes

    @contextmanager
    def _during(self, mode: _Mode) -> Iterator[None]:
        self._mode, self._pass_id = mode, None
        try:
            # Activation checkpointing runs layers again in here, and must find them as they were.
            with self.recorded():
                yield
        finally:
            self._mode, self._notes = _Mode.AS_EVER, []

    def takes(self, note: Note) -> bool:
        """Add the gradients of a layer that a backward pass has come to, or remember it; False if autograd shall."""
        if self._mode is _Mode.AS_EVER or self._accumulated is None:
            return False
        # A backward pass inside the schedule's own (autograd.grad in a custom function) is somebody else's.
        pass_id = torch._C._current_graph_task_id()
        if self._pass_id is None:
            self._pass_id = pass_id
        if pass_id != self._pass_id:
            return False
        if self._mode is _Mode.AT_ONCE:
            self._add(note, ())
        else:
            self._notes.append(note)
            for name in note.names:
                self._accumulated.postpone(name)
        return True

    def add(self, notes: list[Note], final: bool = False) -> None:
        """Compute weight gradients that were left, in the order they were left in, and let go of what they needed.

        Args:
            notes: from :meth:`later`; empty afterwards.
            final: whether these are the last parts of their gradients in this step.
        """
        left = Counter(name for note in notes for name in note.names) if final else Counter[str]()
        notes.reverse()
        while notes:
            note = notes.pop()
            left.subtract(note.names)
            self._add(note, [name for name in note.names if final and not left[name]])

    def _add(self, note: Note, final: "tuple[str, ...] | list[str]") -> None:
        assert self._accumulated is not None
        (layer, module, weight_name, bias_name, _), dy, x = note
        with torch.no_grad():
            total = self._accumulated.gradients[weight_name]
            weight = module._parameters["weight"]
            assert weight is not None
            if dy.dtype == total.dtype == x.dtype or (dy.dtype == total.dtype and not x.is_floating_point()):
                layer.weight_gradient(module, dy, x, weight, total)
            else:
                total.add_(layer.weight_gradient(module, dy, x, weight, None))
            if bias_name is not None:
                bias_total = self._accumulated.gradients[bias_name]
                bias_total.add_(layer.bias_gradient(dy, bias_total.dtype))
        for name in note.names:
            self._accumulated.reached(name, name in final)

    def _run(self, call: _Call, forward: Callable[..., Tensor], /, *args: Any, **kwargs: Any) -> Tensor:
        if not self._recording or kwargs or len(args) != 1 or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        weight, bias = call.module._parameters["weight"], call.module._parameters.get("bias")
        if type(args[0]) is not Tensor or call.layer.input_dims not in (None, args[0].dim()):
            return forward(*args)
        if not _is_plain(weight) or not (bias is None or _is_plain(bias)):
            return forward(*args)
        if torch.compiler.is_compiling() or torch.is_autocast_enabled(args[0].device.type):
            return forward(*args)
        output: Tensor = _Separated.apply(call, args[0], weight, bias)  # type: ignore[no-untyped-call]  # torch
        return output


def _is_plain(parameter: Tensor | None) -> bool:
    """Whether it wants a gradient and nobody looks at how that comes to be."""
    return (
        parameter is not None
        and parameter.requires_grad
        and not parameter._backward_hooks
        # One is hybridpp's own.
        and len(parameter._post_accumulate_grad_hooks or ()) <= 1
    )
