"""Find the first inf or NaN of a step, by running the step again and checking every value."""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridpp.nn import walk
from hybridpp.nn.torch_private import parameters_of, pytree

# Orders after every module of a stage.
_END = 2**31


class StepPosition(NamedTuple):
    """A position in a step: the stage and the micro-batch."""

    stage: int
    microbatch: int


class Finding(NamedTuple):
    """A value that is inf or NaN. Findings sort by time: the least one is the first, and may have caused the others.

    Attributes:
        backward: 1 in the backward pass, which is after all forwards; else 0.
        microbatch: the micro-batch's index.
        stage: the stage's index; negative in the backward pass, which visits stages in reverse.
        order: position in the stage's computation; negative in the backward pass.
        what: a description.
    """

    backward: int
    microbatch: int
    stage: int
    order: int
    what: str

    def __str__(self) -> str:
        return f"{self.what} (stage {abs(self.stage)}, micro-batch {self.microbatch})"


class NonFiniteDetector:
    """Checks the outputs of a model's modules and the gradients of these outputs for inf and NaN.

    Every check waits for the device, so this is for the second run of a step that failed.

    Args:
        model: the model; only modules that run on this rank are checked.
        units: names of the units; the caller calls :meth:`unit` for each call of a unit.
        gradients: returns the accumulated parameter gradients, by name, zero at first.
        where: returns the current position.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Iterable[str],
        gradients: Callable[[], Mapping[str, Tensor]],
        where: Callable[[], StepPosition],
    ):
        self.findings: list[Finding] = []
        self._units = {name: model.get_submodule(name) for name in units}
        self._gradients = gradients
        self._where = where
        self._owners: dict[str, list[nn.Module]] = {}
        self._inner: dict[str, nn.Module] = {}
        parameters = {id(parameter): name for name, parameter in model.named_parameters()}
        for unit, module in self._units.items():
            for name, inner in module.named_modules():
                if inner is not module:
                    self._inner[f"{unit}.{name}" if unit else name] = inner
                for parameter in parameters_of(inner).values():
                    self._owners.setdefault(parameters.get(id(parameter), ""), []).append(inner)
        self._order: dict[StepPosition, int] = {}
        self._began: dict[tuple[StepPosition, nn.Module], int] = {}
        self._run_here: nn.Module | None = None
        self._bad: set[str] = set()
        self._hooked: dict[int, tuple[weakref.ref[Tensor], str, int]] = {}

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """A context in which the output of every module is checked."""
        handles = [
            *(
                module.register_forward_hook(functools.partial(self._on_return, name))
                for name, module in self._inner.items()
            ),
            *(
                module.register_forward_hook(functools.partial(self._after_user_hooks, n))
                for n, module in self._units.items()
            ),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def unit(self, name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a unit, and check its arguments, parameters and outputs."""
        self._enter(self._units[name])
        for number, tensor in enumerate(_tensors((args, kwargs))):
            if kind := _kind(tensor):
                self._find(0, self._next(), f"argument {number} of {name!r} holds {kind}")
        for inner, parameter in walk.named_parameters(self._units[name]):
            if kind := _kind(parameter):
                self._find(0, self._next(), f"parameter {f'{name}.{inner}'.removeprefix('.')!r} holds {kind}")
        output = forward(*args, **kwargs)
        self._on_return(name, self._units[name], None, output)
        self._run_here = self._units[name]
        return output

    def _after_user_hooks(self, name: str, unit: nn.Module, _: Any, output: Any) -> None:
        """Check the output again after the user's hooks; units of other stages are called, but do not run."""
        if unit is self._run_here:
            self._run_here = None
            self._on_return(name, unit, None, output)

    def _next(self) -> int:
        position = self._where()
        self._order[position] = self._order.get(position, 0) + 1
        return self._order[position]

    def _find(self, backward: int, order: int, what: str) -> None:
        stage, microbatch = self._where()
        sign = -1 if backward else 1
        self.findings.append(Finding(backward, microbatch, sign * stage, sign * order, what))

    def _enter(self, module: nn.Module, _: Any = None) -> None:
        # A module's own parameters count as used at its start, so in the backward pass its submodules come first.
        self._began[self._where(), module] = self._next()

    def _on_return(self, name: str, module: nn.Module, _: Any, output: Any) -> None:
        order = self._next()
        for tensor in _tensors(output):
            if kind := _kind(tensor):
                self._find(0, order, f"the output of {name!r} holds {kind}")
            if tensor.requires_grad and self._hooked_at(tensor) is None:
                self._hooked[id(tensor)] = weakref.ref(tensor), name, order
                tensor.register_hook(functools.partial(self._on_gradient, name, order))  # type: ignore[no-untyped-call]  # torch

    def _hooked_at(self, tensor: Tensor) -> tuple[str, int] | None:
        if id(tensor) not in self._hooked:
            return None
        known, name, order = self._hooked[id(tensor)]
        return (name, order) if known() is tensor else None

    def on_output_gradient(self, output: Tensor, gradient: Tensor) -> None:
        """Check the gradient of a tensor that the model returned."""
        name, order = self._hooked_at(output) or ("", _END)
        self._on_gradient(name, order, gradient)

    def _on_gradient(self, name: str, order: int, gradient: Tensor) -> None:
        if kind := _kind(gradient, strict=True):
            # Odd, so before the module's own parameters: backward reaches a module's output first.
            what = repr(name) if name else "the model"
            self._find(1, 2 * order + 1, f"the gradient of the output of {what} holds {kind}")

    def start(self) -> None:
        """Start an action. A stage's forward also calls the units of other stages, which return placeholders."""
        self._run_here = None

    def end(self, action: Any) -> None:
        """Check the parameters' gradients after an action that may have added to them."""
        for name, gradient in self._gradients().items():
            if name not in self._bad and (kind := _kind(gradient, strict=True)):
                self._bad.add(name)
                position = StepPosition(action.stage, action.microbatch or 0)
                orders = [self._began.get((position, module), 0) for module in self._owners.get(name, ())]
                what = f"the gradient of parameter {name!r} holds {kind}"
                self.findings.append(
                    Finding(1, position.microbatch, -position.stage, -2 * max(orders, default=0), what)
                )

    def losses(self, losses: Mapping[int, float], stage: int) -> None:
        """Check the losses of the last stage, ``stage``, by micro-batch."""
        for microbatch, value in losses.items():
            if kind := _kind(torch.tensor(value), strict=True):
                self.findings.append(Finding(0, microbatch, stage, _END, f"the loss is {kind}, from finite modules"))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _kind(tensor: Tensor, strict: bool = False) -> str:
    """``"NaN"``, ``"inf"`` or ``""``. Unless ``strict``, -inf without a gradient is allowed, as masks contain it."""
    values = tensor.detach()
    if bool(values.isnan().any()):
        return "NaN"
    bad = values.isinf() if strict or tensor.requires_grad else values.isposinf()
    return "inf" if bool(bad.any()) else ""
