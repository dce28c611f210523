"""Let something else decide what happens when a model's forward calls one of its units."""

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from torch import nn
from torch.utils.hooks import BackwardHook

Forward = Callable[..., Any]


class UnitHandler(Protocol):
    """Decides what a unit's call returns."""

    def __call__(self, name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of calling the unit ``name``, whose own forward is ``forward``."""


class Interceptor:
    """Routes every unit's forward of one model through the handler that is active, if any.

    The modules keep their classes, names and attributes; only the instance attribute ``forward`` is set, so hooks and
    whatever else ``__call__`` does stay as they are. Without an active handler a unit runs as if nothing were here.

    Attributes:
        units: their names.
        modules: the units themselves, by name.
    """

    def __init__(self, model: nn.Module, units: Iterable[str]):
        self.units = tuple(units)
        self.modules = {name: model.get_submodule(name) for name in self.units}
        self._hooks: dict[str, _Hooks] = {}
        self._handler: UnitHandler | None = None
        for name in self.units:
            module = self.modules[name]
            # functools.partial and no closure, so that the model can still be copied.
            module.forward = functools.partial(self._call, name, module.forward)

    def _call(self, name: str, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        handler = self._handler
        if handler is None:
            return forward(*args, **kwargs)
        if self._hooks and name in self._hooks:
            forward = functools.partial(_hooked, self.modules[name], self._hooks[name], forward)
        return handler(name, forward, args, kwargs)

    @contextmanager
    def active(self, handler: UnitHandler) -> Iterator[None]:
        """Ask ``handler`` at every unit call inside the block."""
        previous = self._handler
        self._handler = handler
        try:
            yield
        finally:
            self._handler = previous

    @contextmanager
    def hooks_inside(self) -> Iterator[None]:
        """Inside, backward hooks of a unit belong to the forward that the handler gets.

        They would be around it: what leaves a stage from inside a unit would pass them by, and where a unit is not
        run they would see gradients all the same.
        """
        for name, module in self.modules.items():
            if module._backward_hooks or module._backward_pre_hooks:
                self._hooks[name] = _Hooks(module._backward_hooks, module._backward_pre_hooks)
                module._backward_hooks, module._backward_pre_hooks = OrderedDict(), OrderedDict()
        try:
            yield
        finally:
            for name, hooks in self._hooks.items():
                self.modules[name]._backward_hooks = hooks.backward
                self.modules[name]._backward_pre_hooks = hooks.before
            self._hooks = {}


class Announcer:
    """Tells whoever listens, if anybody does, which module of a model runs next: less than an interceptor, and faster.

    Args:
        names: of the modules; as in :class:`Interceptor`, only their instance attribute ``forward`` is set.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]):
        self._listener: Callable[[str], None] | None = None
        for name in names:
            module = model.get_submodule(name)
            module.forward = functools.partial(self._call, name, module.forward)

    def _call(self, name: str, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        if self._listener is not None:
            self._listener(name)
        return forward(*args, **kwargs)

    @contextmanager
    def active(self, listener: Callable[[str], None]) -> Iterator[None]:
        """Tell ``listener`` before every call inside the block."""
        previous = self._listener
        self._listener = listener
        try:
            yield
        finally:
            self._listener = previous


class _Hooks(NamedTuple):
    backward: dict[int, Callable[..., Any]]
    before: dict[int, Callable[..., Any]]


def _hooked(module: nn.Module, hooks: _Hooks, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    """What ``module.__call__`` does where there are backward hooks."""
    hook: Any = BackwardHook(module, hooks.backward.values(), hooks.before.values())
    output = forward(*hook.setup_input_hook(args), **kwargs)
    return hook.setup_output_hook(output)
