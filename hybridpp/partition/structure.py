"""What values travel in: the containers that torch's pytree knows, dataclasses, and whatever a unit writes to."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from types import FunctionType, MethodType, ModuleType, NoneType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_CHANGEABLE = (list, dict, OrderedDict, defaultdict, deque)
_ATOMS = frozenset((NoneType, bool, int, float, str, torch.dtype, torch.device))
_CLOSED = (Tensor, nn.Module, type, FunctionType, MethodType, ModuleType)


class Known:
    """Stands for a container among a call's arguments: the container itself, by its place, and no copy of it."""

    def __init__(self, place: int):
        self.place = place


class Kept:
    """Stands for what a container held before, under this key."""

    def __init__(self, key: Any):
        self.key = key


class _Record:
    """An object with fields, in a form that torch's pytree can take apart."""

    def __init__(self, record: Any):
        self.record = record


def flatten(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves and structure, as torch's pytree gives them; dataclasses and namespaces are taken apart too."""
    leaves, spec = pytree.tree_flatten(tree)
    if any(map(_is_record, leaves)):
        return pytree.tree_flatten(_opened(tree))
    return leaves, spec


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors among the leaves of nested containers."""
    found: list[Tensor] = []
    if _is_plain(tree, found):
        return found
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]


def _is_plain(tree: Any, found: list[Tensor]) -> bool:
    """Whether a tree is of the few kinds that nearly all are of, whose tensors are found five times as fast by hand."""
    if isinstance(tree, Tensor):
        found.append(tree)
        return True
    kind = type(tree)
    if kind is tuple or kind is list:
        return all(_is_plain(part, found) for part in tree)
    if kind is dict:
        return all(_is_plain(part, found) for part in tree.values())
    return kind in _ATOMS


class Given:
    """The containers among a call's arguments (lists, dicts, objects with attributes), as they are before the call.

    They are known by place, so that the same can be done to those of another call of the same form.

    Args:
        tree: the arguments.
    """

    def __init__(self, tree: Any):
        self._containers = _containers(tree)
        self._held = [_contents(container) for container in self._containers]

    def changed(self) -> tuple[int, ...]:
        """Those that hold something else now."""
        return tuple(n for n, held in enumerate(self._held) if _is_changed(self._containers[n], held))

    def shares(self, place: int, other: "Given") -> bool:
        """Whether one of them is the same object for both."""
        return self._containers[place] is other._containers[place]

    def changes(self, places: Iterable[int]) -> list[Any]:
        """What these hold now, in terms of what they held before and of one another."""
        return [self._change(place) for place in places if place < len(self._containers)]

    def _change(self, place: int) -> Any:
        old = {id(value): key for key, value in _items(self._held[place])}

        def named(value: Any) -> Any:
            return Kept(old[id(value)]) if id(value) in old else self.refer(value)

        return _mapped(_contents(self._containers[place]), named)

    def repeat(self, places: Iterable[int], changes: Iterable[Any]) -> None:
        """Do what :meth:`changes` told of others."""
        for place, changed in zip(places, changes, strict=True):
            held = self._held[place]

            def value_of(value: Any, held: Any = held) -> Any:
                return held[value.key] if isinstance(value, Kept) else self.resolve(value)

            _fill(self._containers[place], _mapped(changed, value_of))

    def now(self) -> "Given":
        """The same containers, as they are now."""
        return Given(tuple(self._containers))

    def restore(self) -> None:
        """Undo what happened to them."""
        for container, held in zip(self._containers, self._held, strict=True):
            _fill(container, held)

    def refer(self, tree: Any) -> Any:
        """``tree`` with :class:`Known` in the place of these containers."""
        places = {id(container): place for place, container in enumerate(self._containers)}
        return _replaced(tree, lambda part: id(part) in places, lambda part: Known(places[id(part)]))

    def resolve(self, tree: Any) -> Any:
        """``tree`` with these containers in the place of :class:`Known`."""
        return _replaced(tree, lambda part: isinstance(part, Known), lambda part: self._containers[part.place])


def _containers(tree: Any) -> list[Any]:
    """Everything in ``tree`` that a callee could write to, each once: lists, dicts, objects with attributes.

    A key-value cache is among them, but not what it holds: each block writes there for itself.
    """
    found: dict[int, Any] = {}
    pending = [tree]
    while pending:
        thing = pending.pop()
        if isinstance(thing, tuple):
            pending += thing
        elif id(thing) not in found and _is_container(thing):
            found[id(thing)] = thing
            inner = _contents(thing)
            pending += inner.values() if isinstance(inner, dict) else inner
    return list(found.values())


def _contents(container: Any) -> dict[Any, Any] | list[Any]:
    """What one container holds, as a new dict or list."""
    if isinstance(container, dict):
        return dict(container)
    if isinstance(container, list | deque):
        return list(container)
    if is_cache(container):
        return []
    return dict(_fields(container))


def _fill(container: Any, new: dict[Any, Any] | list[Any]) -> None:
    """Let a container hold something else."""
    if isinstance(container, dict) and isinstance(new, dict):
        container.clear()
        container.update(new)
    elif isinstance(container, list | deque):
        container.clear()
        container.extend(new)
    elif isinstance(new, dict):
        for name, value in new.items():
            object.__setattr__(container, name, value)


def _is_changed(container: Any, before: dict[Any, Any] | list[Any]) -> bool:
    """Whether a container holds other objects than before."""
    now = _contents(container)
    if isinstance(now, dict) and isinstance(before, dict):
        return list(now) != list(before) or any(now[key] is not before[key] for key in now)
    return len(now) != len(before) or any(new is not old for new, old in zip(now, before, strict=True))


def _items(held: dict[Any, Any] | list[Any]) -> Iterable[tuple[Any, Any]]:
    return held.items() if isinstance(held, dict) else enumerate(held)


def _mapped(held: dict[Any, Any] | list[Any], function: Callable[[Any], Any]) -> dict[Any, Any] | list[Any]:
    if isinstance(held, dict):
        return {key: function(value) for key, value in held.items()}
    return [function(value) for value in held]


def _replaced(tree: Any, wanted: Callable[[Any], bool], change: Callable[[Any], Any]) -> Any:
    return pytree.tree_map(lambda leaf: change(leaf) if wanted(leaf) else leaf, tree, is_leaf=wanted)


def _is_container(thing: Any) -> bool:
    if type(thing) in _CHANGEABLE or _is_record(thing):
        return True
    # Subclasses of built-in containers have rules of their own (a ModelOutput).
    return hasattr(thing, "__dict__") and not isinstance(thing, (*_CLOSED, dict, list, tuple, set, deque))


def is_cache(thing: Any) -> bool:
    """Whether something is a key-value cache, as transformers' models hand it from block to block."""
    return callable(getattr(type(thing), "get_seq_length", None))


def _is_record(thing: Any) -> bool:
    if isinstance(thing, SimpleNamespace):
        return True
    # Those that torch's pytree knows (a ModelOutput) are dicts.
    return is_dataclass(thing) and not isinstance(thing, type | Tensor | nn.Module | dict)


def _fields(record: Any) -> list[tuple[str, Any]]:
    if is_dataclass(record):
        return [(field.name, getattr(record, field.name)) for field in fields(record) if hasattr(record, field.name)]
    return list(vars(record).items())


def _opened(tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: _Record(leaf) if _is_record(leaf) else leaf, tree)


def _take_apart(opened: _Record) -> tuple[list[Any], tuple[type, tuple[str, ...]]]:
    found = _fields(opened.record)
    return [_opened(value) for _, value in found], (type(opened.record), tuple(name for name, _ in found))


def _put_together(values: Iterable[Any], context: tuple[type, tuple[str, ...]]) -> Any:
    record_type, names = context
    # Neither __init__ nor __post_init__: all is in the fields.
    record: Any = object.__new__(record_type)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(record, name, value)
    return record


pytree.register_pytree_node(_Record, _take_apart, _put_together)
