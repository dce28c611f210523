"""Containers of values that are sent between stages: those that torch's pytree knows, dataclasses, and those
that units write to."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import fields, is_dataclass
from types import FunctionType, MethodType, ModuleType, NoneType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hybridpp.nn.contents import Contents, has_attributes, is_container, is_same
from hybridpp.nn.snapshot import Holder, Snapshot
from hybridpp.nn.torch_private import pytree

_CHANGEABLE = (list, dict, OrderedDict, defaultdict, deque)
_ATOMS = frozenset((NoneType, bool, int, float, str, torch.dtype, torch.device))
_CLOSED = (Tensor, nn.Module, type, tuple, FunctionType, MethodType, ModuleType)


class ContainerRef:
    """Reference to a container among a call's arguments, by its index."""

    def __init__(self, index: int):
        self.index = index


class PreviousItem:
    """Reference to an item that a container held before the call, by its key."""

    def __init__(self, key: Any):
        self.key = key


class _Record:
    """An object with fields, in a form that torch's pytree can flatten."""

    def __init__(self, record: Any):
        self.record = record


def flatten(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves and structure, as in torch's pytree; dataclasses and namespaces are flattened, too."""
    leaves, spec = pytree.tree_flatten(tree)
    if any(map(_is_record, leaves)):
        return pytree.tree_flatten(_with_records(tree))
    return leaves, spec


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors among the leaves of nested containers."""
    found: list[Tensor] = []
    if _is_plain(tree, found):
        return found
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]


def _is_plain(tree: Any, found: list[Tensor]) -> bool:
    """Whether a tree consists of the common kinds only, which is five times as fast as pytree."""
    if isinstance(tree, Tensor):
        found.append(tree)
        return True
    kind = type(tree)
    if kind is tuple or kind is list:
        return all(_is_plain(part, found) for part in tree)
    if kind is dict:
        return all(_is_plain(part, found) for part in tree.values())
    return kind in _ATOMS


class ContainerSnapshot(Snapshot):
    """Snapshot of the containers among a call's arguments (lists, dicts, objects with attributes) before the call.

    Containers are identified by index, so that changes can be repeated on the arguments of another call.

    Args:
        tree: the arguments.
        reached: other things that the call may write to; what they hold is counted after that of the arguments.

    Attributes:
        num_given: number of the containers among the arguments.
    """

    def __init__(self, tree: Any, reached: tuple[Any, ...] = ()):
        found = _containers(tree)
        self.num_given = len(found)
        if reached:
            known = {id(holder.thing) for holder, _ in found}
            found += [other for other in _containers(reached) if id(other[0].thing) not in known]
        super().__init__(found)
        self._containers = [holder.thing for holder, _ in self._before]

    def kinds(self) -> Hashable:
        """Describes what was reached beside the arguments: kinds, sizes and plain values; equal for what is alike."""
        return tuple(
            (type(holder.thing), tuple((repr(key), _kind(value)) for key, value in _items(held)))
            for holder, held in self._before[self.num_given :]
        )

    def changed(self) -> tuple[int, ...]:
        """Indices of the containers whose contents have changed."""
        return tuple(n for n, (holder, held) in enumerate(self._before) if not is_same(holder.read(holder.thing), held))

    def shares(self, index: int, other: "ContainerSnapshot") -> bool:
        """Whether the container at this index is the same object in both."""
        return self._containers[index] is other._containers[index]

    def changes(self, indices: Iterable[int]) -> list[Any]:
        """The contents of these containers now, with references to previous items and to the containers."""
        return [self._change(index) for index in indices if index < len(self._containers)]

    def _change(self, index: int) -> Any:
        holder, held = self._before[index]
        old = {id(value): key for key, value in _items(held)}

        def named(value: Any) -> Any:
            return PreviousItem(old[id(value)]) if id(value) in old else self.to_refs(value)

        return _mapped(holder.read(holder.thing), named)

    def repeat(self, indices: Iterable[int], changes: Iterable[Any]) -> None:
        """Apply the result of :meth:`changes` of another call."""
        for index, changed in zip(indices, changes, strict=True):
            holder, held = self._before[index]

            def value_of(value: Any, held: Any = held) -> Any:
                return held[value.key] if isinstance(value, PreviousItem) else self.from_refs(value)

            holder.put(holder.thing, _mapped(changed, value_of))

    def now(self) -> "ContainerSnapshot":
        """A snapshot of the same containers now."""
        return ContainerSnapshot(tuple(self._containers))

    def to_refs(self, tree: Any) -> Any:
        """``tree`` with these containers replaced by :class:`ContainerRef`."""
        indices = {id(container): index for index, container in enumerate(self._containers)}
        return _replaced(tree, lambda part: id(part) in indices, lambda part: ContainerRef(indices[id(part)]))

    def from_refs(self, tree: Any) -> Any:
        """``tree`` with :class:`ContainerRef` replaced by these containers."""
        return _replaced(tree, lambda part: isinstance(part, ContainerRef), lambda part: self._containers[part.index])


def _containers(tree: Any) -> list[tuple[Holder, Contents]]:
    """The distinct containers in ``tree`` that a callee could write to: lists, dicts, objects with attributes.

    A key-value cache is one of them, but not what it holds: each block writes its own entries.
    """
    found: dict[int, tuple[Holder, Contents]] = {}
    pending = [tree]
    while pending:
        thing = pending.pop()
        if isinstance(thing, tuple):
            pending += thing
        elif id(thing) not in found and _is_container(thing):
            holder = _holder(thing)
            contents = holder.read(thing)
            found[id(thing)] = holder, contents
            pending += contents.values() if isinstance(contents, dict) else contents
    return list(found.values())


def _holder(container: Any) -> Holder:
    if is_container(container):
        return Holder.of_items(container)
    return Holder(container, lambda _: [], lambda *_: None) if is_cache(container) else Holder.of_attributes(container)


def _kind(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | None) else type(value)


def _items(held: Contents) -> Iterable[tuple[Any, Any]]:
    return held.items() if isinstance(held, dict) else enumerate(held)


def _mapped(held: Contents, function: Callable[[Any], Any]) -> Contents:
    if isinstance(held, dict):
        return {key: function(value) for key, value in held.items()}
    return [function(value) for value in held]


def _replaced(tree: Any, wanted: Callable[[Any], bool], change: Callable[[Any], Any]) -> Any:
    return pytree.tree_map(lambda leaf: change(leaf) if wanted(leaf) else leaf, tree, is_leaf=wanted)


def _is_container(thing: Any) -> bool:
    if type(thing) in _CHANGEABLE or _is_record(thing):
        return True
    # Subclasses of built-in containers have their own semantics (a ModelOutput).
    return has_attributes(thing) and not isinstance(thing, _CLOSED) and not is_container(thing)


def is_cache(thing: Any) -> bool:
    """Whether an object is a key-value cache, as transformers' models pass it from block to block."""
    return callable(getattr(type(thing), "get_seq_length", None))


def _is_record(thing: Any) -> bool:
    if isinstance(thing, SimpleNamespace):
        return True
    # Dataclasses that torch's pytree knows (a ModelOutput) are dicts.
    return is_dataclass(thing) and not isinstance(thing, type | Tensor | nn.Module | dict)


def _fields(record: Any) -> list[tuple[str, Any]]:
    if is_dataclass(record):
        return [(field.name, getattr(record, field.name)) for field in fields(record) if hasattr(record, field.name)]
    return list(vars(record).items())


def _with_records(tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: _Record(leaf) if _is_record(leaf) else leaf, tree)


def _flatten_record(wrapped: _Record) -> tuple[list[Any], tuple[type, tuple[str, ...]]]:
    found = _fields(wrapped.record)
    return [_with_records(value) for _, value in found], (type(wrapped.record), tuple(name for name, _ in found))


def _unflatten_record(values: Iterable[Any], context: tuple[type, tuple[str, ...]]) -> Any:
    record_type, names = context
    # Without __init__ and __post_init__: the fields are complete.
    record: Any = object.__new__(record_type)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(record, name, value)
    return record


pytree.register_pytree_node(_Record, _flatten_record, _unflatten_record)
