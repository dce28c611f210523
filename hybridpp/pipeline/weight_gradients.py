"""The layers of a model whose weight gradients a schedule can defer.

Most of a model's weights are in a few kinds of layers. While a schedule that splits the backward pass runs, these
layers go through an autograd function whose backward computes only the input's gradient, and stores what the weight's
gradient needs in a task (Qi et al. 2023, arXiv:2401.10241, split the pass the same way). The task runs in the
schedule's W action (``scheduled_wgrads.py``). All other layers, and all layers under schedules that do not split,
compute all gradients in the normal backward pass.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hybridpp.module_adapter import AdapterLayer, ModuleAdapter
from hybridpp.nn import walk
from hybridpp.nn.torch_private import is_any_autocast_enabled, parameters_of
from hybridpp.pipeline.compiled_wgrad import number_of, separated_linear
from hybridpp.pipeline.deferred_wgrad import LayerBinding, deferred_wgrad
from hybridpp.pipeline.scheduled_wgrads import GradientSink, ScheduledWgrads
from hybridpp.pipeline.split_backward_ops import SplitBackwardOps, split_backward_ops


class WeightGradients(ScheduledWgrads):
    """Runs the layers of a model whose weight gradients can be deferred.

    Outside of :meth:`recording_forward` these layers run their own forward.

    Args:
        adapter: of the model.
        layers: the operations of modules that tensor parallelism shards; other modules are recognised by class.
        excluded: modules whose weight gradients are never deferred (those in modules that the script compiled).
        compiled: modules in compiled blocks; the weight gradients of those that are ``nn.Linear`` can be deferred, or
            added in the kernel that computes them.

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
        parameters_of_model = walk.named_parameters(model)
        names = {id(parameter): name for name, parameter in parameters_of_model}
        super().__init__()
        self._bindings: list[LayerBinding] = []
        separable: set[str] = set()
        self._others: Counter[str] = Counter()
        for module in walk.modules(model):
            ops = None if module in excluded else (layers or {}).get(module) or split_backward_ops(module)
            is_compiled = module in compiled
            ops = None if is_compiled and type(module).forward is not nn.Linear.forward else ops
            if ops is None:
                self._others[type(module).__name__] += any(
                    p.requires_grad for p in parameters_of(module).values() if p is not None
                )
                continue
            parameters = (parameters_of(module)["weight"], parameters_of(module).get("bias"))
            binding = LayerBinding(ops, module, tuple(names[id(p)] for p in parameters if p is not None), self)
            self._bindings.append(binding)
            separable.update(binding.names)
            run, more = (self._run_compiled, (number_of(binding),)) if is_compiled else (self._run, ())
            adapter.wrap(module, AdapterLayer.WEIGHT_GRADIENTS, run, binding, *more)
        self.is_always_needed = any(binding.ops.overlap_comm for binding in self._bindings)
        trainable = {name: p.numel() for name, p in parameters_of_model if p.requires_grad}
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
        """Set where gradients accumulate, once the model is cut; without a sink, nothing is deferred."""
        self._sink = sink
        for binding in self._bindings:
            binding.take_parameters()
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

    def _run(self, binding: LayerBinding, forward: Callable[..., Tensor], /, *args: Any, **kwargs: Any) -> Tensor:
        wanted = self._splits or binding.ops.overlap_comm or binding.adds_products
        if (
            self._recording
            and binding.is_deferrable
            and wanted
            and len(args) == 1
            and not kwargs
            and binding.holds(parameters_of(binding.module))
            and _is_plain_input(args[0], binding)
        ):
            x, ops, weight, bias = args[0], binding.ops, binding.weight, binding.bias
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
        is_wanted = self._recording and (self._splits or binding.adds_products) and binding.is_deferrable
        if not is_wanted or kwargs or len(args) != 1:
            return forward(*args, **kwargs)
        module: Any = binding.module
        x, weight, bias = args[0], module.weight, module.bias
        is_own = weight is binding.weight and bias is binding.bias
        is_separable = is_own and x.dim() > 1 and x.requires_grad and x.dtype is weight.dtype
        is_separable = is_separable and torch.is_grad_enabled()
        if not is_separable or torch.is_autocast_enabled(x.device.type):
            return forward(x)
        y = separated_linear(x.flatten(0, -2), weight, bias, number)
        return y.view(x.shape[:-1] + y.shape[-1:])


def _is_plain_input(x: Any, binding: LayerBinding) -> bool:
    ops, weight = binding.ops, binding.weight
    return (
        type(x) is Tensor
        # Mixed dtypes are left to torch's own rules.
        and (weight is None or x.dtype is weight.dtype or not x.is_floating_point())
        and (x.dim() == ops.input_dims or (ops.any_dims and x.dim() > ops.input_dims))
        and torch.is_grad_enabled()
        and not is_any_autocast_enabled()
        and not torch.compiler.is_compiling()
    )
