"""Let something else decide what happens when a module is called."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from hybridpp.module_adapter.adapter import ModuleAdapter
from hybridpp.module_adapter.order import AdapterLayer
from hybridpp.module_adapter.wrapper import Forward
from hybridpp.nn import walk

# Asked for every layer that runs.
_is_compiling = torch.compiler.is_compiling


class CallHandler(Protocol):
    """Decides what a module's call returns."""

    def __call__(self, name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of calling the module ``name``; ``forward`` is its own, with its hooks."""


class CallRouter:
    """Routes every call of some modules of one model through the handler that is active, if any.

    Calling a module runs its hooks around ``forward``, and a handler decides about both. A ``forward`` that is called
    by name (by the script, or by recomputation) is routed without hooks. Without an active handler a module runs as if
    nothing were here.

    Args:
        adapter: of the model.
        layer: what the handlers do.
        names: of the modules.

    Attributes:
        modules: those, by name.
    """

    def __init__(self, adapter: ModuleAdapter, layer: AdapterLayer, names: Iterable[str]):
        self.modules: Mapping[str, nn.Module] = {name: walk.submodule(adapter.model, name) for name in names}
        self._handler: CallHandler | None = None
        # The module whose call was routed, until it gets to its forward.
        self._routed: str | None = None
        for name, module in self.modules.items():
            adapter.wrap_call(module, layer, self._call, name)
            adapter.wrap(module, layer, self._forward, name)

    def _call(self, name: str, call: Forward, /, *args: Any, **kwargs: Any) -> Any:
        handler = self._handler
        if handler is None:
            return call(*args, **kwargs)
        return handler(name, partial(self._with_hooks, name, call), args, kwargs)

    def _with_hooks(self, name: str, call: Forward, /, *args: Any, **kwargs: Any) -> Any:
        self._routed = name
        try:
            return call(*args, **kwargs)
        finally:
            self._routed = None

    def _forward(self, name: str, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        if _is_compiling():
            return forward(*args, **kwargs)
        handler = self._handler
        if handler is None:
            return forward(*args, **kwargs)
        if self._routed != name:
            return handler(name, forward, args, kwargs)
        self._routed = None
        return forward(*args, **kwargs)

    @contextmanager
    def active(self, handler: CallHandler) -> Iterator[None]:
        """Ask ``handler`` at every call inside the block."""
        previous, self._handler = self._handler, handler
        try:
            yield
        finally:
            self._handler = previous
