"""Deferred weight gradients, for schedules that split the backward pass.

Most of a model's weights are in a few kinds of layers. While a schedule that splits the backward pass runs, these
layers go through an autograd function whose backward computes only the input's gradient, and stores what the weight's
gradient needs in a task (Qi et al. 2023, arXiv:2401.10241, split the pass the same way). The task runs in the
schedule's W action, with autograd's kernels and in autograd's order, so the result is the same bit for bit. All other
layers, and all layers under schedules that do not split, compute all gradients in the normal backward pass.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hybridpp.module_adapter import AdapterLayer, ModuleAdapter
from hybridpp.nn.torch_private import current_graph_task_id, is_any_autocast_enabled, parameters_of
from hybridpp.pipeline.compiled_wgrad import number_of, separated_linear
from hybridpp.pipeline.deferred_wgrad import LayerBinding, WgradTask, deferred_wgrad
from hybridpp.pipeline.split_backward_ops import SavedInput, SplitBackwardOps, split_backward_ops


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


class WeightGradients:
    """Runs the layers of a model whose weight gradients can be deferred.

    Outside of :meth:`recording_forward` these layers run their own forward.

    Args:
        adapter: of the model.
        layers: the operations of modules that tensor parallelism shards; other modules are recognised by class.
        excluded: modules whose weight gradients are never deferred (those in modules that the script compiled).
        compiled: modules in compiled blocks; the weight gradients of those that are ``nn.Linear`` can be deferred.

    Attributes:
        is_always_needed: whether some layers' weight gradients overlap communication, or are added in the kernel that
            computes them. Without such layers, only a schedule that splits backward passes needs any of the methods.
    """

    def __init__(
        self,
        adapter: ModuleAdapter,
        layers: Mapping[nn.Module, SplitBackwardOps] | None = None,
        excluded: Collection[nn.Module] = (),
        compiled: Collection[nn.Module] = (),
    ):
        model = adapter.model
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._sink: GradientSink | None = None
        self._recording = False
        self._splits = False
        self._bindings: list[LayerBinding] = []
        self._mode = _DISABLED
        self._wgrad_tasks: list[WgradTask] = []
        self._overlapped: list[WgradTask] = []
        self._pass_id: int | None = None
        separable: set[str] = set()
        self._others: Counter[str] = Counter()
        for module in model.modules():
            ops = None if module in excluded else (layers or {}).get(module) or split_backward_ops(module)
            is_compiled = module in compiled
            ops = None if is_compiled and type(module).forward is not nn.Linear.forward else ops
            if ops is None:
                self._others[type(module).__name__] += any(p.requires_grad for p in module.parameters(recurse=False))
                continue
            parameters = (parameters_of(module)["weight"], parameters_of(module).get("bias"))
            binding = LayerBinding(ops, module, tuple(names[id(p)] for p in parameters if p is not None), self)
            self._bindings.append(binding)
            separable.update(binding.names)
            run, more = (self._run_compiled, (number_of(binding),)) if is_compiled else (self._run, ())
            adapter.wrap(module, AdapterLayer.WEIGHT_GRADIENTS, run, binding, *more)
        self.is_always_needed = any(binding.ops.overlap_comm for binding in self._bindings)
        trainable = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
        self._num_separable = sum(size for name, size in trainable.items() if name in separable)
        self._num_trainable = sum(trainable.values())

    def report(self) -> str:
        """One line: the share of trainable weights whose gradients W computes, and the modules of which it does not."""
        share = 100 * self._num_separable / max(self._num_trainable, 1)
        others = ", ".join(f"{number} {name}" for name, number in self._others.most_common() if number)
        line = (
            f"the schedule's W computes the gradients of {share:.1f} % of the {self._num_trainable:,} trainable weights"
        )
        return f"{line}; its I those of {others}." if others else f"{line}."

    def __deepcopy__(self, memo: dict[int, Any]) -> "WeightGradients":
        """An empty object: the layers of a copy of a boosted model (averaged weights, for example) defer nothing."""
        return WeightGradients(ModuleAdapter(nn.Module()))

    def attach_sink(self, sink: GradientSink) -> None:
        """Set where gradients accumulate; without a sink, nothing is deferred."""
        self._sink = sink
        for binding in self._bindings:
            binding.adds_products = binding.ops.factors is not None and sink.takes_products(binding.names[0])
        self.is_always_needed |= any(binding.adds_products for binding in self._bindings)

    def begin(self, splits: bool) -> None:
        """Before a step.

        Args:
            splits: whether its schedule has W actions.
        """
        wanted = self._sink is not None
        for binding in self._bindings:
            is_called = splits or binding.ops.overlap_comm or binding.adds_products
            binding.is_deferrable = wanted and is_called and binding.is_plain()

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
        weight: Any = parameters_of(module)["weight"]
        gradients = ops.weight_gradients(module, task.dy, task.input(), weight, len(binding.names) > 1)
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

    def _run(self, binding: LayerBinding, forward: Callable[..., Tensor], /, *args: Any, **kwargs: Any) -> Tensor:
        wanted = self._splits or binding.ops.overlap_comm or binding.adds_products
        if (
            self._recording
            and binding.is_deferrable
            and wanted
            and len(args) == 1
            and not kwargs
            and _is_plain_input(args[0], binding)
        ):
            x, ops, parameters = args[0], binding.ops, parameters_of(binding.module)
            weight, bias = parameters["weight"], parameters.get("bias")
            x = x if ops.pre_forward is None else ops.pre_forward(x)
            if ops.input_dims == x.dim() or not x.is_contiguous():
                y = deferred_wgrad(binding, x, weight, bias)
            else:
                # As a list of samples and back: what a function of its own returns should not be a view (see
                # DeferredWgradFunction).
                count = x.dim() - ops.input_dims + 1
                y = deferred_wgrad(binding, x.flatten(0, count - 1), weight, bias)
                y = y.view(x.shape[:count] + y.shape[1:])
            return y if ops.post_forward is None else ops.post_forward(y)
        return forward(*args, **kwargs)

    def _run_compiled(
        self, binding: LayerBinding, number: Tensor, forward: Callable[..., Tensor], /, *args: Any, **kwargs: Any
    ) -> Tensor:
        """In code that is compiled: what it reads, the compiler compares at every call of a block."""
        if not (self._recording and self._splits and binding.is_deferrable) or kwargs or len(args) != 1:
            return forward(*args, **kwargs)
        module: Any = binding.module
        x, weight, bias = args[0], module.weight, module.bias
        is_separable = x.dim() > 1 and x.requires_grad and x.dtype is weight.dtype and torch.is_grad_enabled()
        if not is_separable or torch.is_autocast_enabled(x.device.type):
            return forward(x)
        y = separated_linear(x.flatten(0, -2), weight, bias, number)
        return y.view(x.shape[:-1] + y.shape[-1:])


def _is_plain_input(x: Any, binding: LayerBinding) -> bool:
    ops, weight = binding.ops, parameters_of(binding.module)["weight"]
    return (
        type(x) is Tensor
        # Mixed dtypes are left to torch's own rules.
        and (weight is None or x.dtype is weight.dtype or not x.is_floating_point())
        and (x.dim() == ops.input_dims or (ops.any_dims and x.dim() > ops.input_dims))
        and torch.is_grad_enabled()
        and not is_any_autocast_enabled()
        and not torch.compiler.is_compiling()
    )
