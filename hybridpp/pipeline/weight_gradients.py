"""Weight gradients apart from the rest of the backward pass, for schedules that say when they are computed.

Most of a model's weights are in a few kinds of layers. While a schedule that splits the backward pass runs, those are
called through an autograd function that goes back to the input only, and notes what the weight's gradient is made of
(Qi et al. 2023, arXiv:2401.10241, split the pass the same way). The note waits for the schedule's W action, which uses
autograd's own kernels and adds up in autograd's order, so no schedule changes a bit of the result. Everything else
computes its gradients as ever, in the pass that goes back to the input; and so do all layers where no schedule splits.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hybridpp.pipeline.layers import Kept, Layer, layer_of
from hybridpp.pipeline.separated import Call, Note, separated


class Accumulated(Protocol):
    """Where gradients add up."""

    def postpone(self, names: Iterable[str]) -> None:
        """Parts of these gradients follow after the pass that goes back to the input."""

    def reached(self, names: Iterable[str]) -> None:
        """Parts will be added to these."""

    def add(self, name: str, gradient: Tensor) -> None:
        """Add a part to the sum of the parameter ``name``."""

    def completed(self, name: str) -> None:
        """The last part of this step was added."""


class _Mode(Enum):
    AS_EVER = auto()
    AT_ONCE = auto()
    LATER = auto()


# Looked up for every layer that runs.
_AS_EVER, _AT_ONCE, _LATER = _Mode


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
        self._splits = False
        self._calls: list[Call] = []
        self._mode = _AS_EVER
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
            call = Call(layer, module, tuple(names[id(p)] for p in parameters if p is not None), self)
            self._calls.append(call)
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

    def begin(self, splits: bool) -> None:
        """Before a step.

        Args:
            splits: whether its schedule leaves weight gradients for later.
        """
        wanted = self._accumulated is not None
        for call in self._calls:
            call.may_be_apart = wanted and (splits or call.layer.may_wait) and call.is_plain()

    @contextmanager
    def recorded(self, splits: bool) -> Iterator[None]:
        """Around a forward pass of training, so that its backward pass can leave weight gradients for later.

        Args:
            splits: whether the schedule does so for this one.
        """
        self._recording, self._splits = True, splits
        try:
            yield
        finally:
            self._recording = False

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Around a backward pass that computes everything."""
        with self._during(_AT_ONCE, splits=False):
            yield

    @contextmanager
    def later(self, splits: bool) -> Iterator[list[Note]]:
        """Around a backward pass that leaves weight gradients to :meth:`add`, in the list that the block gets.

        Args:
            splits: as for its forward, in :meth:`recorded`.
        """
        notes: list[Note] = []
        self._notes = notes
        with self._during(_LATER, splits):
            yield notes

    @contextmanager
    def _during(self, mode: _Mode, splits: bool) -> Iterator[None]:
        self._mode, self._pass_id = mode, None
        try:
            # Activation checkpointing runs layers again in here, and must find them as they were.
            with self.recorded(splits):
                yield
            self.release()
        finally:
            self._mode, self._notes, self._waiting = _AS_EVER, [], []

    def release(self) -> None:
        """Compute weight gradients that wait for others' communication; called while that is under way."""
        notes, self._waiting = self._waiting, []
        self.add(notes)

    def keep(self, layer: Layer, x: Tensor) -> tuple[Tensor, Kept | None]:
        """What to save of a layer's input, and how to have all of it again; None: it is all of it."""
        found = None if layer.keep is None else layer.keep(x, self._splits)
        if found is None:
            return x, None
        found[1].expect()
        return found

    def before(self, note: Note) -> None:
        """Before a layer's input gradient is computed: its weight's may follow soon."""
        if self._mode is not _LATER:
            note.start()

    def takes(self, note: Note, may_wait: bool) -> bool:
        """Remember what the gradients of a layer's weights are made of; False if autograd shall compute them."""
        mode = self._mode
        # Gradients of gradients are autograd's.
        if mode is _AS_EVER or (mode is _AT_ONCE and not may_wait) or torch.is_grad_enabled():
            return False
        # A backward pass inside the schedule's own (autograd.grad in a custom function) is somebody else's.
        pass_id = torch._C._current_graph_task_id()
        if self._pass_id is None:
            self._pass_id = pass_id
        if pass_id != self._pass_id or self._accumulated is None:
            return False
        if mode is _AT_ONCE:
            self._waiting.append(note)
        else:
            self._notes.append(note)
            self._accumulated.postpone(note.call.names)
        return True

    def add(self, notes: list[Note], final: bool = False) -> None:
        """Compute weight gradients that were left, in the order they were left in, and let go of what they needed.

        Args:
            notes: from :meth:`later`; empty afterwards.
            final: whether these are the last parts of their gradients in this step.
        """
        if self._accumulated is None or not notes:
            return
        left = Counter(name for note in notes for name in note.call.names)
        self._accumulated.reached(left)
        sums: dict[str, Tensor] = {}
        notes.reverse()
        with torch.no_grad():
            notes[-1].start()
            while notes:
                note = notes.pop()
                if notes:
                    # While this one is computed.
                    notes[-1].start()
                call, layer, module = note.call, note.call.layer, note.call.module
                weight: Any = module._parameters["weight"]
                gradients = layer.weight_gradients(module, note.dy, note.input(), weight, len(call.names) > 1)
                for name, gradient in zip(call.names, gradients, strict=False):
                    assert gradient is not None
                    left[name] -= 1
                    self._add(name, gradient, sums, is_last=not left[name] or layer.may_wait)
                    if final and not left[name]:
                        self._accumulated.completed(name)

    def _add(self, name: str, gradient: Tensor, sums: dict[str, Tensor], is_last: bool) -> None:
        # Like autograd, which sums up what one pass gives to a parameter before it adds that to what is there.
        if name in sums:
            gradient = sums.pop(name).add_(gradient)
        if is_last:
            assert self._accumulated is not None
            self._accumulated.add(name, gradient)
        else:
            sums[name] = gradient

    def _run(self, call: Call, forward: Callable[..., Tensor], /, *args: Any, **kwargs: Any) -> Tensor:
        is_apart = self._recording and call.may_be_apart and (self._splits or call.layer.may_wait)
        if is_apart and len(args) == 1 and not kwargs and _is_plain_input(args[0], call.layer):
            x, layer, parameters = args[0], call.layer, call.module._parameters
            weight, bias = parameters["weight"], parameters.get("bias")
            x = x if layer.prepare is None else layer.prepare(x)
            if layer.input_dims == x.dim() or not x.is_contiguous():
                y = separated(call, x, weight, bias)
            else:
                # As a list of samples and back: what a function of its own returns should not be a view (see
                # Separated).
                count = x.dim() - layer.input_dims + 1
                y = separated(call, x.flatten(0, count - 1), weight, bias)
                y = y.view(x.shape[:count] + y.shape[1:])
            return y if layer.finish is None else layer.finish(y)
        return forward(*args, **kwargs)


def _is_plain_input(x: Any, layer: Layer) -> bool:
    return (
        type(x) is Tensor
        and (x.dim() == layer.input_dims or (layer.any_dims and x.dim() > layer.input_dims))
        and torch.is_grad_enabled()
        and not torch._C._is_any_autocast_enabled()
        and not torch.compiler.is_compiling()
    )
