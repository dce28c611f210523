"""Tensors in objects among a call's arguments, such as a key-value cache that blocks write to."""

from collections.abc import Callable, Iterable
from functools import partial
from types import FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, Never

from torch import Tensor, nn

from hybridpp.errors import PartitionError
from hybridpp.nn.snapshot import reachable
from hybridpp.partition.containers import is_cache

_PLAIN = (Tensor, bool, int, float, str, type(None))
_CLOSED = (Tensor, nn.Module, type, FunctionType, MethodType, ModuleType)


class RemoteObject:
    """Replaces an object with tensors that a unit of another stage returned; any use of it raises an error."""

    def __init__(self, unit: str, thing: Any):
        vars(self)["_text"] = (
            f"unit {unit!r} returned a {type(thing).__name__}, which cannot be sent to another stage, but is used "
            "there. Return tensors in tuples, lists, dicts or dataclasses, or use pp_size=1."
        )

    def _refuse(self, *args: Any) -> Never:
        raise PartitionError(vars(self)["_text"])

    __getattr__ = __getitem__ = __iter__ = __next__ = __len__ = __call__ = __bool__ = _refuse


def replace_tensors(objects: Iterable[Any], change: Callable[[Tensor], Any]) -> None:
    """Replace each tensor that can be reached from some objects by ``change(tensor)``; modules are not entered."""
    for holder, contents in reachable(objects)[0]:
        items = contents.items() if isinstance(contents, dict) else enumerate(contents)
        for key, value in list(items):
            contents[key] = _changed(value, change)
        holder.put(holder.thing, contents)


def holds_tensors(thing: Any) -> bool:
    """Whether tensors can be reached from an object, or are created when it is iterated over."""
    return isinstance(thing, GeneratorType) or reachable([thing])[1]


def may_hide_tensors(thing: Any) -> bool:
    """Whether an argument that is no tensor may give a call tensors: a function, or an object that holds tensors.

    A key-value cache does not count: each block reads its own entries there, or ``cache_entries.py`` refuses it.
    """
    if isinstance(thing, FunctionType | MethodType | partial):
        return True
    return not isinstance(thing, _PLAIN) and not is_cache(thing) and holds_tensors(thing)


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """A value with its tensors changed, also in tuples; the value itself if it has none."""
    if isinstance(value, Tensor):
        return change(value)
    if not isinstance(value, tuple):
        return value
    parts = [_changed(part, change) for part in value]
    if all(new is old for new, old in zip(parts, value, strict=True)):
        return value
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
