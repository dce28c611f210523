"""When weight gradients are computed in a step: at once, while communication runs, or in the schedule's W action.

Tasks run with autograd's kernels and in autograd's order, so the result is the same bit for bit.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from hybridpp.nn.torch_private import current_graph_task_id
from hybridpp.pipeline.deferred_wgrad import WgradTask
from hybridpp.pipeline.split_backward_ops import SavedInput, SplitBackwardOps


class GradientSink(Protocol):
    """Accumulates gradients by parameter name."""

    def defer(self, names: Iterable[str]) -> None:
        """Announce that the running backward pass does not complete these gradients."""

    def mark_reached(self, names: Iterable[str]) -> None:
        """Announce that :meth:`add` follows for these parameters."""

    def add(self, name: str, gradient: Tensor) -> None:
        """Add to the gradient of the parameter ``name``."""

    def takes_products(self, name: str) -> bool:
        """Whether :meth:`add_product` works for the parameter ``name``."""

    def add_product(self, name: str, a: Tensor, b: Tensor) -> None:
        """Add the product of two matrices to the gradient of the parameter ``name``."""

    def mark_complete(self, name: str) -> None:
        """Announce that the last :meth:`add` of the step for ``name`` is done."""


class _Mode(Enum):
    DISABLED = auto()
    FULL_BACKWARD = auto()
    INPUT_BACKWARD = auto()


# Looked up for every layer that runs.
_DISABLED, _FULL_BACKWARD, _INPUT_BACKWARD = _Mode


class ScheduledWgrads:
    """The weight gradients of one rank's layers, in the backward passes of a schedule."""

    def __init__(self) -> None:
        self._sink: GradientSink | None = None
        self._recording = False
        self._splits = False
        self._mode = _DISABLED
        self._wgrad_tasks: list[WgradTask] = []
        self._overlapped: list[WgradTask] = []
        self._pass_id: int | None = None
        self._prehooks: list[RemovableHandle] = []

    @contextmanager
    def recording_forward(self, splits: bool) -> Iterator[None]:
        """A context for a training forward whose backward pass may defer weight gradients.

        Args:
            splits: whether the schedule splits this micro-batch's backward pass.
        """
        self._recording, self._splits = True, splits
        try:
            yield
        finally:
            self._recording = False

    @contextmanager
    def full_backward(self) -> Iterator[None]:
        """A context for a backward pass that computes all gradients."""
        with self._during(_FULL_BACKWARD, splits=False):
            yield

    @contextmanager
    def input_backward(self, splits: bool) -> Iterator[list[WgradTask]]:
        """A context for a backward pass that defers weight gradients to tasks, for :meth:`add`.

        Args:
            splits: as for its forward, in :meth:`recording_forward`.
        """
        tasks: list[WgradTask] = []
        self._wgrad_tasks = tasks
        with self._during(_INPUT_BACKWARD, splits):
            yield tasks

    @contextmanager
    def _during(self, mode: _Mode, splits: bool) -> Iterator[None]:
        self._mode, self._pass_id = mode, None
        try:
            # Activation checkpointing runs forwards again in here, under the same setting.
            with self.recording_forward(splits):
                yield
            self.run_overlapped()
        finally:
            self._mode, self._wgrad_tasks, self._overlapped = _DISABLED, [], []
            while self._prehooks:
                self._prehooks.pop().remove()

    def begin_at(self, nodes: Iterable[Node]) -> None:
        """Tell the pass that begins at these nodes from passes inside of it, which recomputed code may run first."""
        self._prehooks += [node.register_prehook(self._note_pass) for node in nodes]

    def _note_pass(self, gradients: Sequence[Tensor | None]) -> None:
        if self._pass_id is None:
            self._pass_id = current_graph_task_id()

    def run_overlapped(self) -> None:
        """Compute the weight gradients that are to overlap communication; called while communication runs."""
        tasks, self._overlapped = self._overlapped, []
        self.add(tasks)

    def save_input(self, ops: SplitBackwardOps, x: Tensor) -> tuple[Tensor, SavedInput | None]:
        """What to save of a layer's input, and a handle that restores the input; None: the input itself is saved."""
        found = None if ops.save_input is None else ops.save_input(x, self._splits)
        if found is None:
            return x, None
        found[1].expect()
        return found

    def before(self, task: WgradTask) -> None:
        """Called before a layer's input gradient is computed: starts to restore the input, unless it is deferred."""
        if self._mode is not _INPUT_BACKWARD:
            task.start()

    def try_defer(self, task: WgradTask, overlap_comm: bool) -> bool:
        """Keep the task of a layer's weight gradients for later; False: the caller computes them now."""
        mode = self._mode
        waits = overlap_comm or (mode is _INPUT_BACKWARD and self._splits)
        if not waits or not self._is_pass_of_schedule() or self._sink is None:
            return False
        if mode is _FULL_BACKWARD:
            self._overlapped.append(task)
        else:
            self._wgrad_tasks.append(task)
            self._sink.defer(task.binding.names)
        return True

    def _is_pass_of_schedule(self) -> bool:
        # With create_graph, autograd must record the computation.
        if self._mode is _DISABLED or torch.is_grad_enabled():
            return False
        # A nested backward pass (autograd.grad in a custom function) is not the schedule's.
        pass_id = current_graph_task_id()
        if self._pass_id is None:
            self._pass_id = pass_id
        return pass_id == self._pass_id

    def try_add(self, task: WgradTask) -> bool:
        """Add a weight's gradient to its sum in the kernel that computes it; False: the caller computes it now."""
        # When all layers that use a weight have added, autograd calls the hook on its gradient, with nothing to add.
        if self._sink is None or not self._is_pass_of_schedule():
            return False
        self._sink.mark_reached(task.binding.names)
        self._add_product(task, self._sink)
        return True

    def _add_product(self, task: WgradTask, sink: GradientSink) -> None:
        binding, x = task.binding, task.input()
        ops, module, names = binding.ops, binding.module, binding.names
        assert ops.factors is not None
        assert ops.bias_gradient is not None
        sink.add_product(names[0], *ops.factors(module, task.dy, x))
        if len(names) > 1:
            sink.add(names[1], ops.bias_gradient(module, task.dy, x))

    def add(self, tasks: list[WgradTask], final: bool = False) -> None:
        """Run deferred tasks in order, and release their tensors.

        Args:
            tasks: from :meth:`input_backward`; empty afterwards.
            final: whether these tasks complete their parameters' gradients of this step.
        """
        if self._sink is None or not tasks:
            return
        left = Counter(name for task in tasks for name in task.binding.names)
        self._sink.mark_reached(left)
        sums: dict[str, Tensor] = {}
        tasks.reverse()
        with torch.no_grad():
            tasks[-1].start()
            while tasks:
                task = tasks.pop()
                if tasks:
                    # Restore the next input while this gradient is computed.
                    tasks[-1].start()
                self._add_task(task, left, sums)
                for name in task.binding.names:
                    if not left[name] and name in sums:
                        self._sink.add(name, sums.pop(name))
                    if final and not left[name]:
                        self._sink.mark_complete(name)

    def _add_task(self, task: WgradTask, left: Counter[str], sums: dict[str, Tensor]) -> None:
        assert self._sink is not None
        left.subtract(task.binding.names)
        if task.binding.adds_products:
            self._add_product(task, self._sink)
            return
        binding, ops, module = task.binding, task.binding.ops, task.binding.module
        assert binding.weight is not None, "the module of a binding has a weight"
        gradients = ops.weight_gradients(module, task.dy, task.input(), binding.weight, len(binding.names) > 1)
        for name, gradient in zip(binding.names, gradients, strict=False):
            assert gradient is not None
            self._add(name, gradient, sums, is_last=not left[name] or ops.overlap_comm)

    def _add(self, name: str, gradient: Tensor, sums: dict[str, Tensor], is_last: bool) -> None:
        # As autograd does: contributions of one pass to a parameter are summed before they are accumulated.
        if name in sums:
            gradient = sums.pop(name).add_(gradient)
        if is_last:
            assert self._sink is not None
            self._sink.add(name, gradient)
        else:
            sums[name] = gradient
