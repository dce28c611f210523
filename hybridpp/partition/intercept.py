"""Route the unit calls of a model's forward through a handler."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hybridpp.module_adapter import AdapterLayer, CallRouter, Forward, ModuleAdapter
from hybridpp.nn import walk
from hybridpp.nn.torch_private import forward_hooks_of, forward_pre_hooks_of
from hybridpp.partition.hooks import ModelHooks

# Looked up for every layer that runs.
_is_compiling = torch.compiler.is_compiling


class Interceptor(CallRouter):
    """Routes every call of a unit of one model through the handler that is active, if any.

    Hooks of a unit that are container code run around the handler, on every stage; the others belong to the unit.

    Args:
        adapter: of the model.
        layer: what the handlers do.
        units: their names.

    Attributes:
        units: their names.
        hooks: the classification of the model's hooks.
        around: ``around(name, forward, *args, **kwargs)`` runs each unit inside the handler; None: it runs by itself.
    """

    def __init__(self, adapter: ModuleAdapter, layer: AdapterLayer, units: Iterable[str]):
        self.units = tuple(units)
        self.around: Callable[..., Any] | None = None
        self.hooks = ModelHooks(adapter.model)
        super().__init__(adapter, layer, self.units)

    def outside(self, model: nn.Module) -> list[nn.Module]:
        """The modules of a model that are in none of its units: its containers."""
        inside = {part for unit in self.modules.values() for part in walk.modules(unit)}
        return [module for module in walk.modules(model) if module not in inside]

    def _call(self, name: str, call: Forward, /, *args: Any, **kwargs: Any) -> Any:
        handler = self._handler
        if self.around is not None:
            call = functools.partial(self.around, name, call)
        if handler is None:
            return call(*args, **kwargs)
        unit = functools.partial(self._with_hooks, name, call)
        module = self.modules[name]
        container_hooks = (
            self.hooks.container_code_of(module) if forward_hooks_of(module) or forward_pre_hooks_of(module) else None
        )
        if container_hooks is None:
            return handler(name, unit, args, kwargs)
        return container_hooks.run(functools.partial(handler, name, unit), args, kwargs)


class ForwardListener:
    """Reports which module of a model runs next to the listener that is active, if any: cheaper than an interceptor.

    Args:
        adapter: of the model.
        names: of the modules.
    """

    def __init__(self, adapter: ModuleAdapter, names: Iterable[str]):
        self._listener: Callable[[str], None] | None = None
        for name in names:
            adapter.wrap(walk.submodule(adapter.model, name), AdapterLayer.LAYER_RNG, self._call, name)

    def _call(self, name: str, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        if not _is_compiling() and self._listener is not None:
            self._listener(name)
        return forward(*args, **kwargs)

    @contextmanager
    def active(self, listener: Callable[[str], None]) -> Iterator[None]:
        """Call ``listener(name)`` before every call inside the block."""
        previous = self._listener
        self._listener = listener
        try:
            yield
        finally:
            self._listener = previous
