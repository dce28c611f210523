"""Leave things as they were found: what dicts, lists, objects and modules hold is noted, and put back later."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridpp.nn import walk
from hybridpp.nn.contents import (
    Contents,
    attributes_of,
    has_attributes,
    is_container,
    is_empty,
    is_same,
    items_of,
    put_attributes,
    put_items,
)
from hybridpp.nn.torch_private import pytree

MISSING: Any = object()
"""Stands for the value of an entry that a dict does not have."""

_CLOSED = (Tensor, nn.Module, type, FunctionType, MethodType, ModuleType)


class Holder(NamedTuple):
    """A container or an object, how to read what it holds, and how to let it hold something else."""

    thing: Any
    read: Callable[[Any], Contents]
    put: Callable[[Any, Any], None]

    @classmethod
    def of_items(cls, container: Any) -> "Holder":
        """Of what a dict, list, deque or set holds."""
        return cls(container, items_of, put_items)

    @classmethod
    def of_attributes(cls, thing: Any) -> "Holder":
        """Of an object's own attributes."""
        return cls(thing, attributes_of, put_attributes)


class Snapshot:
    """What some containers and objects hold when this is made.

    Args:
        before: each with what it holds.
    """

    def __init__(self, before: Iterable[tuple[Holder, Contents]]):
        self._before = list(before)
        # Containers that held nothing, as most of a module's do; they need no copy.
        self._empty: list[Any] = []

    @classmethod
    def of_modules(cls, model: nn.Module) -> "Snapshot":
        """Of a model's modules: parameters, buffers, hooks and other attributes, and what containers among those hold.

        What lies deeper is not in it, nor are the values of tensors.
        """
        containers: list[Any] = []
        for module in walk.modules(model):
            attributes = vars(module)
            containers += [attributes, *filter(is_container, attributes.values())]
        made = cls((Holder.of_items(held), items_of(held)) for held in containers if not is_empty(held))
        made._empty = [container for container in containers if is_empty(container)]
        return made

    @classmethod
    def reachable_from(cls, tree: Any, num_levels: int | None = None) -> "Snapshot":
        """Of all that can be reached from the leaves of ``tree`` but modules; not of the containers of ``tree`` itself.

        Args:
            tree: nested containers, as torch's pytree knows them.
            num_levels: how far; 1 is what the leaves themselves hold. None: all that can be reached.
        """
        return cls(reachable(pytree.tree_leaves(tree), num_levels)[0])

    def has_changed(self) -> bool:
        """Whether any of them holds something else now."""
        if any(self._empty):
            return True
        return any(not is_same(holder.read(holder.thing), contents) for holder, contents in self._before)

    def tensors(self) -> list[Tensor]:
        """The tensors that they held; not those in tuples."""
        held = (contents.values() if isinstance(contents, dict) else contents for _, contents in self._before)
        return [value for values in held for value in values if isinstance(value, Tensor)]

    def restore(self) -> None:
        """Let all of them hold that again; what did not change is not written to."""
        for holder, contents in self._before:
            holder.put(holder.thing, contents)
        for container in filter(None, self._empty):
            container.clear()


class Replacements:
    """Entries of dicts (a module's parameters, buffers, hooks or attributes) that are replaced for a while."""

    def __init__(self) -> None:
        self._before: list[tuple[dict[Any, Any], Any, Any, Any]] = []

    def put(self, held: dict[Any, Any], key: Any, value: Any) -> None:
        """Replace an entry, or add one."""
        self._before.append((held, key, held.get(key, MISSING), value))
        held[key] = value

    def restore(self, keep_newer: bool = False) -> None:
        """Put back what was replaced.

        Args:
            keep_newer: leave entries that somebody else has replaced or removed since.
        """
        for held, key, before, put in reversed(self._before):
            if not keep_newer or held.get(key, MISSING) is put:
                put_entry(held, key, before)


def put_entry(held: dict[Any, Any], key: Any, value: Any) -> None:
    """Set an entry of a dict; ``MISSING`` removes it."""
    if value is MISSING:
        held.pop(key, None)
    else:
        held[key] = value


@contextmanager
def preserved_modules(model: nn.Module) -> Iterator[None]:
    """Undo, afterwards, what happens inside to what :meth:`Snapshot.of_modules` notes."""
    before = Snapshot.of_modules(model)
    try:
        yield
    finally:
        before.restore()


@contextmanager
def preserved_buffer_values(model: nn.Module) -> Iterator[None]:
    """Give the buffers, afterwards, the values that they had; they are copied."""
    before = [(buffer, buffer.clone()) for buffer in map(_unexpanded, walk.buffers(model))]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, values in before:
                buffer.copy_(values)


def _unexpanded(tensor: Tensor) -> Tensor:
    """A view without the dimensions along which a tensor is expanded, whose elements are one in memory."""
    if tensor.layout is torch.strided:
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[dim] > 1:
                tensor = tensor.narrow(dim, 0, 1)
    return tensor


def reachable(objects: Iterable[Any], num_levels: int | None = None) -> tuple[list[tuple[Holder, Contents]], bool]:
    """Everything below some objects that holds others, with what it holds; and whether there is a tensor.

    Level by level, so that each is found at the first one it is on.
    """
    found: list[tuple[Holder, Contents]] = []
    any_tensor = False
    # The objects themselves, so that no id is used twice.
    seen: dict[int, Any] = {}
    level, number = list(objects), 0
    while level and (num_levels is None or number < num_levels):
        below: list[Any] = []
        for thing in level:
            any_tensor |= isinstance(thing, Tensor)
            if id(thing) in seen or isinstance(thing, _CLOSED):
                continue
            seen[id(thing)] = thing
            if isinstance(thing, tuple):
                below += thing
            elif isinstance(thing, MappingProxyType):
                below += thing.values()
            for holder in holders(thing):
                contents = holder.read(thing)
                found.append((holder, contents))
                below += contents.values() if isinstance(contents, dict) else contents
        level, number = below, number + 1
    return found, any_tensor


def holders(thing: Any) -> list[Holder]:
    """What of a thing can be read and put back: none of modules, tensors, classes and functions."""
    if isinstance(thing, _CLOSED):
        return []
    held = [Holder.of_items(thing)] if is_container(thing) else []
    return [*held, Holder.of_attributes(thing)] if has_attributes(thing) else held
