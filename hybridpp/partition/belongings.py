"""What the objects among a call's arguments hold: a key-value cache, say, that a model's blocks write to."""

from collections.abc import Callable
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.utils import _pytree as pytree

Container: TypeAlias = dict[Any, Any] | list[Any]

_CLOSED = (Tensor, nn.Module, type, FunctionType, MethodType, ModuleType)


class Belongings:
    """The lists, dicts and attributes of all objects that can be reached from some arguments.

    Modules are left out, and the arguments' own containers: those are seen anyway.
    """

    def __init__(self, arguments: Any):
        self._objects = [leaf for leaf in pytree.tree_leaves(arguments) if not isinstance(leaf, Tensor)]
        self._before: list[tuple[Container, Any]] = [(found, found.copy()) for found in _containers(self._objects)]

    def restore(self) -> None:
        """Undo what happened to them since."""
        for container, contents in self._before:
            container.clear()
            if isinstance(container, list):
                container.extend(contents)
            else:
                container.update(contents)

    def replace(self, change: Callable[[Any], Any]) -> None:
        """Put ``change(tensor)`` in the place of each tensor."""
        for container in _containers(self._objects):
            for key, value in list(container.items() if isinstance(container, dict) else enumerate(container)):
                if isinstance(value, Tensor):
                    container[key] = change(value)


def _containers(objects: list[Any]) -> list[Container]:
    found: list[Container] = []
    # The objects themselves, so that no id is used twice.
    seen: dict[int, Any] = {}
    pending = list(objects)
    while pending:
        thing = pending.pop()
        if id(thing) in seen or isinstance(thing, _CLOSED):
            continue
        seen[id(thing)] = thing
        if isinstance(thing, tuple):
            pending += thing
            continue
        contents = thing if isinstance(thing, dict | list) else getattr(thing, "__dict__", None)
        if isinstance(contents, dict | list):
            found.append(contents)
            pending += contents.values() if isinstance(contents, dict) else contents
    return found
