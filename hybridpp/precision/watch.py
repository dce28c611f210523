"""Find where the first inf or NaN of a step stands, by running it again and looking at everything."""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

# Behind every module of a stage.
_END = 2**31


class Place(NamedTuple):
    """Where in a step: the stage and the micro-batch."""

    stage: int
    microbatch: int


class Finding(NamedTuple):
    """Something that is not finite. The least one is the first: whatever else is not finite may follow from it.

    Attributes:
        backward: 1 if it stands in the backward pass, which comes after all forwards.
        microbatch: in which micro-batch.
        stage: counted down in the backward pass: -1 is stage 1.
        order: place among what the stage computes; counted down in the backward pass.
        what: in words.
    """

    backward: int
    microbatch: int
    stage: int
    order: int
    what: str

    def __str__(self) -> str:
        return f"{self.what} (stage {abs(self.stage)}, micro-batch {self.microbatch})"


class Watch:
    """Looks at what the modules of a model return, and at the gradients that come back to them.

    Every look waits for the device, so this is for a second run of a step that went wrong in the first.

    Args:
        model: the model; modules that never run here are never looked at.
        units: what runs as a whole, by name; the caller calls :meth:`unit` for each call of one.
        gradients: the sums of the parameters' gradients, from zero.
        where: tells the place under way.
    """

    def __init__(
        self, model: nn.Module, units: Iterable[str], gradients: Mapping[str, Tensor], where: Callable[[], Place]
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
                for parameter in inner.parameters(recurse=False):
                    self._owners.setdefault(parameters.get(id(parameter), ""), []).append(inner)
        self._order: dict[Place, int] = {}
        self._began: dict[tuple[Place, nn.Module], int] = {}
        self._run_here: nn.Module | None = None
        self._bad: set[str] = set()
        self._hooked: dict[int, tuple[weakref.ref[Tensor], str, int]] = {}

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Inside, modules are looked at as they return."""
        handles = [
            *(
                module.register_forward_hook(functools.partial(self._left, name))
                for name, module in self._inner.items()
            ),
            *(module.register_forward_hook(functools.partial(self._behind, n)) for n, module in self._units.items()),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def unit(self, name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a unit, and look at what it is given, made of and returns."""
        self._enter(self._units[name])
        for number, tensor in enumerate(_tensors((args, kwargs))):
            if kind := _kind(tensor):
                self._find(0, self._next(), f"argument {number} of {name!r} holds {kind}")
        for inner, parameter in self._units[name].named_parameters():
            if kind := _kind(parameter):
                self._find(0, self._next(), f"parameter {f'{name}.{inner}'.removeprefix('.')!r} holds {kind}")
        output = forward(*args, **kwargs)
        self._left(name, self._units[name], None, output)
        self._run_here = self._units[name]
        return output

    def _behind(self, name: str, unit: nn.Module, _: Any, output: Any) -> None:
        """Look again behind the user's own hooks; a unit of another stage is called too, but not run."""
        if unit is self._run_here:
            self._run_here = None
            self._left(name, unit, None, output)

    def _next(self) -> int:
        place = self._where()
        self._order[place] = self._order.get(place, 0) + 1
        return self._order[place]

    def _find(self, backward: int, order: int, what: str) -> None:
        stage, microbatch = self._where()
        sign = -1 if backward else 1
        self.findings.append(Finding(backward, microbatch, sign * stage, sign * order, what))

    def _enter(self, module: nn.Module, _: Any = None) -> None:
        # A module's own parameters count as used at its start: what comes back to modules in it comes first.
        self._began[self._where(), module] = self._next()

    def _left(self, name: str, module: nn.Module, _: Any, output: Any) -> None:
        order = self._next()
        for tensor in _tensors(output):
            if kind := _kind(tensor):
                self._find(0, order, f"the output of {name!r} holds {kind}")
            if tensor.requires_grad and self._hooked_at(tensor) is None:
                self._hooked[id(tensor)] = weakref.ref(tensor), name, order
                tensor.register_hook(functools.partial(self._came_back, name, order))  # type: ignore[no-untyped-call]  # torch

    def _hooked_at(self, tensor: Tensor) -> tuple[str, int] | None:
        if id(tensor) not in self._hooked:
            return None
        known, name, order = self._hooked[id(tensor)]
        return (name, order) if known() is tensor else None

    def came_back(self, output: Tensor, gradient: Tensor) -> None:
        """Look at the gradient that came back to something that the model returned."""
        name, order = self._hooked_at(output) or ("", _END)
        self._came_back(name, order, gradient)

    def _came_back(self, name: str, order: int, gradient: Tensor) -> None:
        if kind := _kind(gradient, strict=True):
            # Half a place later than the module's own parameters: backward, what comes to a module comes first.
            what = repr(name) if name else "the model"
            self._find(1, 2 * order + 1, f"the gradient of the output of {what} holds {kind}")

    def start(self) -> None:
        """Before an action; the forward of another stage calls units that the last one ran, and gets placeholders."""
        self._run_here = None

    def end(self, action: Any) -> None:
        """Look at the parameters' gradients after an action that may have added to them."""
        for name, gradient in self._gradients.items():
            if name not in self._bad and (kind := _kind(gradient, strict=True)):
                self._bad.add(name)
                place = Place(action.stage, action.microbatch or 0)
                orders = [self._began.get((place, module), 0) for module in self._owners.get(name, ())]
                what = f"the gradient of parameter {name!r} holds {kind}"
                self.findings.append(Finding(1, place.microbatch, -place.stage, -2 * max(orders, default=0), what))

    def losses(self, losses: Mapping[int, float], stage: int) -> None:
        """Look at the losses, by micro-batch, that ``stage`` ended with."""
        for microbatch, value in losses.items():
            if kind := _kind(torch.tensor(value), strict=True):
                self.findings.append(Finding(0, microbatch, stage, _END, f"the loss is {kind}, from finite modules"))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _kind(tensor: Tensor, strict: bool = False) -> str:
    """``"NaN"`` or ``"inf"``, or nothing; -inf that wants no gradient is a mask, unless ``strict``."""
    values = tensor.detach()
    if bool(values.isnan().any()):
        return "NaN"
    bad = values.isinf() if strict or tensor.requires_grad else values.isposinf()
    return "inf" if bool(bad.any()) else ""
