"""What the objects among a call's arguments hold: a key-value cache, say, that a model's blocks write to."""

from collections.abc import Callable
from functools import partial
from types import FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, Never, TypeAlias

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hybridpp.errors import PartitionError
from hybridpp.partition.structure import is_cache

Container: TypeAlias = dict[Any, Any] | list[Any]

_PLAIN = (Tensor, bool, int, float, str, type(None))
_CLOSED = (Tensor, nn.Module, type, FunctionType, MethodType, ModuleType)


class Elsewhere:
    """Stands for an object full of tensors that a unit of another stage made; whoever looks into it is told."""

    def __init__(self, unit: str, thing: Any):
        vars(self)["_text"] = (
            f"unit {unit!r} returned a {type(thing).__name__}, which cannot travel to another stage, but is used "
            "there. Return tensors in tuples, lists, dicts or dataclasses, or use pp_size=1."
        )

    def _refuse(self, *args: Any) -> Never:
        raise PartitionError(vars(self)["_text"])

    __getattr__ = __getitem__ = __iter__ = __next__ = __len__ = __call__ = __bool__ = _refuse


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


def holds_tensors(thing: Any) -> bool:
    """Whether tensors can be reached from an object that is none, and no module; or are made when it is looked at."""
    if isinstance(thing, GeneratorType):
        return True
    found = _containers([thing])
    return any(
        isinstance(value, Tensor)
        for contents in found
        for value in (contents.values() if isinstance(contents, dict) else contents)
    )


def may_hide_tensors(thing: Any) -> bool:
    """Whether a call may get tensors from an argument that is none: a function, or an object that holds some.

    Not from a key-value cache: there each block finds its own.
    """
    if isinstance(thing, FunctionType | MethodType | partial):
        return True
    return not isinstance(thing, _PLAIN) and not is_cache(thing) and holds_tensors(thing)


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
