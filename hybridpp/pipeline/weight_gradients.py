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

    def reached(self, names: tuple[str, ...]) -> None:
        """Parts were added to these."""

    def completed(self, name: str) -> None:
        """The last part of this step was added."""


class _Call(NamedTuple):
    """A layer of the model; its weight's name comes first, then its bias's if it has one."""

    layer: Layer
    module: nn.Module
    names: tuple[str, ...]
    owner: "WeightGradients"


class Note(NamedTuple):
    """What the gradients of a layer's weights are made of, for one of its calls."""

    call: _Call
    dy: Tensor
    x: Tensor


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
        output = call.layer.forward(call.module, x, weight, bias)
        # Autograd refuses to let a view be written to that was made in here (`embeddings += positions` does that). This
        # is the same memory, but no view to autograd; nobody else holds its base.
        return torch.ops.aten._unsafe_view(output, output.shape) if output._is_view() else output

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, Tensor | None, Tensor | None]:
        call: _Call = ctx.call
        x, weight = ctx.saved_tensors
        dx = call.layer.input_gradient(call.module, dy, x, weight) if ctx.needs_input_grad[1] else None
        if call.owner.takes(Note(call, dy, x), may_wait=call.layer.may_wait and dx is not None):
            return None, dx, None, None
        dw = call.layer.weight_gradient(call.module, dy, x, weight, None)
        return None, dx, dw, call.layer.bias_gradient(dy, dy.dtype) if ctx.needs_input_grad[3] else None


def _separated(call: _Call, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if torch._C._are_functorch_transforms_active():
        output: Tensor = _Separated.apply(call, x, weight, bias)  # type: ignore[no-untyped-call]  # torch
        return output
    # What `apply` comes to without functorch: it costs more Python there than all of this file.
    direct: Tensor = super(torch.autograd.Function, _Separated).apply(call, x, weight, bias)  # type: ignore[no-untyped-call]
    return direct


class WeightGradients:
    """Runs those layers of a model whose weight gradients can be told apart.

    The modules keep their classes and attributes; only the instance attribute ``forward`` is set. Outside of
    :meth:`recorded` they run as ever.

    Args:
        model: before it is cut, so that whatever intercepts its modules finds these forwards.
        layers: how modules compute whose forwards were set already; others are known by their class.
    """

    def __init__(self, model: nn.Module, layers: Mapping[nn.Module, Layer] | None = None):
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._accumulated: Accumulated | None = None
        self._recording = False
        self._mode = _Mode.AS_EVER
        self._notes: list[Note] = []
        self._waiting: list[Note] = []
        self._pass_id: int | None = None
        separable: set[str] = set()
        self._others: Counter[str] = Counter()
        for module in model.modules():
            layer = (layers or {}).get(module) or layer_of(module)
            if layer is None:
                self._others[type(module).__name__] += any(p.requires_grad for p in module.parameters(recurse=False))
                continue
            parameters = (module._parameters["weight"], module._parameters.get("bias"))
            call = _Call(layer, module, tuple(names[id(p)] for p in parameters if p is not None), self)
            separable.update(call.names)
            # functools.partial and no closure, so that the model can still be copied.
            module.forward = functools.partial(self._run, call, module.forward)
        trainable = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
        self._num_separable = sum(size for name, size in trainable.items() if name in separable)
        self._num_trainable = sum(trainable.values())

    def report(self) -> str:
        """One line that says how much of the model a split backward leaves for W, and what it does not."""
        share = 100 * self._num_separable / max(self._num_trainable, 1)
        others = ", ".join(f"{number} {name}" for name, number in self._others.most_common() if number)
        line = (
            f"the schedule's W computes the gradients of {share:.1f} % of the {self._num_trainable:,} trainable weights"
        )
        return f"{line}; its I those of {others}." if others else f"{line}."

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
            self.release()
        finally:
            self._mode, self._notes, self._waiting = _Mode.AS_EVER, [], []

    def release(self) -> None:
        """Compute weight gradients that wait for others' communication; called while that is under way."""
        notes, self._waiting = self._waiting, []
        self.add(notes)

    def takes(self, note: Note, may_wait: bool = False) -> bool:
        """Add the gradients of a layer that a backward pass has come to, or remember it; False if autograd shall."""
        # Gradients of gradients are autograd's.
        if self._mode is _Mode.AS_EVER or self._accumulated is None or torch.is_grad_enabled():
            return False
        # A backward pass inside the schedule's own (autograd.grad in a custom function) is somebody else's.
        pass_id = torch._C._current_graph_task_id()
        if self._pass_id is None:
            self._pass_id = pass_id
        if pass_id != self._pass_id:
            return False
        if self._mode is _Mode.AT_ONCE and may_wait:
            self._waiting.append(note)
        elif self._mode is _Mode.AT_ONCE:
            self._add(note, self._accumulated)
        else:
            self._notes.append(note)
            for name in note.call.names:
                self._accumulated.postpone(name)
        return True

    def add(self, notes: list[Note], final: bool = False) -> None:
        """Compute weight gradients that were left, in the order they were left in, and let go of what they needed.

        Args:
            notes: from :meth:`later`; empty afterwards.
            final: whether these are the last parts of their gradients in this step.
        """
        if self._accumulated is None:
            return
        left = Counter(name for note in notes for name in note.call.names) if final else None
        notes.reverse()
        with torch.no_grad():
            while notes:
                note = notes.pop()
                self._add(note, self._accumulated)
                if left is not None:
                    left.subtract(note.call.names)
                    for name in note.call.names:
                        if not left[name]:
                            self._accumulated.completed(name)

    @staticmethod
    def _add(note: Note, accumulated: Accumulated) -> None:
        (layer, module, names, _), dy, x = note
        total, weight = accumulated.gradients[names[0]], module._parameters["weight"]
        assert weight is not None
        if dy.dtype is total.dtype and (x.dtype is total.dtype or not x.is_floating_point()):
            layer.weight_gradient(module, dy, x, weight, total)
        else:
            total.add_(layer.weight_gradient(module, dy, x, weight, None))
        if len(names) > 1:
            bias_total = accumulated.gradients[names[1]]
            bias_total.add_(layer.bias_gradient(dy, bias_total.dtype))
        accumulated.reached(names)

    def _run(self, call: _Call, forward: Callable[..., Tensor], /, *args: Any, **kwargs: Any) -> Tensor:
        if self._recording and len(args) == 1 and not kwargs and torch.is_grad_enabled():
            x = args[0]
            weight, bias = call.module._parameters["weight"], call.module._parameters.get("bias")
            if _is_plain(weight) and (bias is None or _is_plain(bias)) and _is_plain_input(x, call.layer):
                x = x if call.layer.prepare is None else call.layer.prepare(x)
                return _separated(call, x, weight, bias)
        return forward(*args, **kwargs)


def _is_plain_input(x: Any, layer: Layer) -> bool:
    return (
        type(x) is Tensor
        and layer.input_dims in (None, x.dim())
        and not torch._C._is_any_autocast_enabled()
        and not torch.compiler.is_compiling()
    )


def _is_plain(parameter: Tensor | None) -> bool:
    """Whether it wants a gradient and nobody looks at how that comes to be."""
    return (
        parameter is not None
        and parameter.requires_grad
        and not parameter._backward_hooks
        # One is hybridpp's own.
        and len(parameter._post_accumulate_grad_hooks or ()) <= 1
    )
