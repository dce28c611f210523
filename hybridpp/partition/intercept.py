"""Let something else decide what happens when a model's forward calls one of its units."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn

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
    """

    def __init__(self, model: nn.Module, units: Iterable[str]):
        self.units = tuple(units)
        self._handler: UnitHandler | None = None
        for name in self.units:
            module = model.get_submodule(name)
            # functools.partial and no closure, so that the model can still be copied.
            module.forward = functools.partial(self._call, name, module.forward)

    def _call(self, name: str, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        if self._handler is None:
            return forward(*args, **kwargs)
        return self._handler(name, forward, args, kwargs)

    @contextmanager
    def active(self, handler: UnitHandler) -> Iterator[None]:
        """Ask ``handler`` at every unit call inside the block."""
        previous = self._handler
        self._handler = handler
        try:
            yield
        finally:
            self._handler = previous
