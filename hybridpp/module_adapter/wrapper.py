"""One module with the layers that are put around its forward."""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from torch import nn

from hybridpp.module_adapter.order import AdapterLayer
from hybridpp.nn.snapshot import MISSING
from hybridpp.nn.torch_private import CALL, COMPILED_CALL
from hybridpp.nn.uncompiled import uncompiled

Forward = Callable[..., Any]

# They communicate, and keep what layers share: a compiler would run that once, on fake tensors.
_COMMUNICATE = frozenset(
    {
        AdapterLayer.SHARD,
        AdapterLayer.SHARDED_ARGUMENTS,
        AdapterLayer.GATHERED_INPUTS,
        AdapterLayer.LOCAL_WIDTH,
        AdapterLayer.SEQUENCE_GATHER,
        AdapterLayer.SEQUENCE_REPLICATED,
        AdapterLayer.SEQUENCE_SHARD,
    }
)
_FORWARD, _CALL, _COMPILED_CALL = "forward", CALL, COMPILED_CALL


class _Run(NamedTuple):
    """A layer's function, and what is bound to it before the next layer."""

    function: Forward
    bound: tuple[Any, ...]


class _CompilableCall:
    def __init__(self, function: Forward, bound: tuple[Any, ...]):
        self.function, self.bound = function, bound

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*self.bound, *args, **kwargs)


def _compilable_partial(function: Forward, *bound: Any) -> Forward:
    """``functools.partial(function, *bound)`` of which torch's compiler makes one code for all modules of a kind.

    It recognises a partial, or an object, that is a module's forward by its identity, but a method by its function.
    """
    return _CompilableCall(function, bound).run


class ModuleWrapper:
    """The layers of one module, and the attributes of it that a call goes through.

    Args:
        module: as the script made it.
        order: of the layers, the innermost first.
        is_compiled: whether calls of the module are compiled. Those of one with layers that communicate are not.
    """

    def __init__(self, module: nn.Module, order: Sequence[AdapterLayer], is_compiled: bool = False):
        self._bind: Callable[..., Any] = _compilable_partial if is_compiled else functools.partial
        self._is_compiled = is_compiled
        self._module = module
        self._order = order
        # MISSING: the class's own counts.
        self._found = {name: vars(module).get(name, MISSING) for name in (_FORWARD, _CALL, _COMPILED_CALL)}
        self._own: dict[str, Forward | None] = {name: getattr(module, name) for name in self._found}
        self._put: dict[str, Any] = {}
        self._inside: dict[AdapterLayer, _Run] = {}
        self._around: dict[AdapterLayer, _Run] = {}

    @property
    def layers(self) -> tuple[AdapterLayer, ...]:
        """The layers that are on the module, the outermost first."""
        return tuple(layer for layer in reversed(self._order) if layer in self._inside or layer in self._around)

    def add(self, layer: AdapterLayer, function: Forward, bound: tuple[Any, ...], *, around_hooks: bool) -> None:
        """Put a layer into its position, around the module's hooks or inside of them."""
        runs = self._around if around_hooks else self._inside
        assert layer in self._order, f"{layer!r} is not in the order of layers"
        assert layer not in runs, f"{type(self._module).__name__} has the layer {layer!r} already"
        runs[layer] = _Run(function, bound)
        self._compose()

    def take_off(self, layer: AdapterLayer) -> None:
        """Take a layer off, if it is there."""
        found = [runs.pop(layer, None) for runs in (self._inside, self._around)]
        if any(found):
            self._compose()

    def replaced_attribute(self) -> str | None:
        """An attribute that was composed here and that somebody else has replaced since; None: there is none."""
        attributes = vars(self._module)
        return next((name for name, put in self._put.items() if attributes.get(name) is not put), None)

    def _compose(self) -> None:
        forward = self._nested(self._inside, _FORWARD)
        if forward is not MISSING and AdapterLayer.MODEL in self._inside:
            _sign(forward, self._own[_FORWARD])
        self._set(_FORWARD, forward)
        self._set(_CALL, self._nested(self._around, _CALL))
        if (compiled := self._own[_COMPILED_CALL]) is not None:
            # What runs around the hooks as well is not compiled with them.
            inside = {layer: run for layer, run in self._inside.items() if layer not in self._around}
            inner = functools.partial(_call_compiled, self._module, self._nested(inside, _FORWARD), compiled)
            self._set(_COMPILED_CALL, self._nested(self._around, _COMPILED_CALL, inner))

    def _nested(self, runs: dict[AdapterLayer, _Run], name: str, innermost: Forward | None = None) -> Any:
        """The layers around the module's own attribute, or around ``innermost``; without layers what was found."""
        if not runs:
            return self._found[name]
        nested: Any = innermost or self._own[name]
        for run in [*runs.values()] if len(runs) == 1 else [runs[layer] for layer in self._order if layer in runs]:
            nested = self._bind(run.function, *run.bound, nested)
        return self._bind(uncompiled(), nested) if self._is_compiled and _COMMUNICATE & runs.keys() else nested

    def _set(self, name: str, value: Any) -> None:
        attributes = vars(self._module)
        if value is not self._found[name]:
            attributes[name] = self._put[name] = value
        elif self._put.pop(name, None) is not None:
            if value is MISSING:
                del attributes[name]
            else:
                attributes[name] = value


def forwards_inside(forward: Any) -> Iterator[Any]:
    """A module's forward, and those that it calls in turn: the layers that are put around its own, and that one."""
    while forward is not None:
        yield forward
        if isinstance(forward, functools.partial):
            forward = forward.args[-1] if forward.args else None
        else:
            call = getattr(forward, "__self__", None)
            forward = call.bound[-1] if isinstance(call, _CompilableCall) and call.bound else None


def replace_forward(module: nn.Module, function: Forward, *bound: Any) -> None:
    """Let ``function(*bound, *args, **kwargs)`` be a module's own forward, at the wish of the script that made it."""
    vars(module)[_FORWARD] = functools.partial(function, *bound)


def _call_compiled(module: nn.Module, forward: Any, compiled: Forward, /, *args: Any, **kwargs: Any) -> Any:
    """Call a module that is compiled in place with ``forward`` as its forward, whatever was put around that."""
    attributes = vars(module)
    now = attributes.pop(_FORWARD)
    if forward is not MISSING:
        attributes[_FORWARD] = forward
    try:
        return compiled(*args, **kwargs)
    finally:
        attributes[_FORWARD] = now


def _sign(forward: Any, like: Any) -> None:
    """Let ``inspect.signature(forward)`` be that of another callable."""
    with suppress(TypeError, ValueError):  # some callables have no signature
        forward.__signature__ = inspect.signature(like)
