"""Module attributes that a unit sets for container code: ``self.aux_loss = ...``, ``self.losses.append(...)``."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from torch import nn

from hybridpp.nn import walk
from hybridpp.nn.snapshot import MISSING, Replacements
from hybridpp.nn.torch_private import buffers_of, pytree
from hybridpp.partition.containers import ContainerSnapshot, tensors_in

AttributeKey: TypeAlias = tuple[str, str]
"""An attribute: the module's name inside the unit, and the attribute's name."""

AttributeSlot: TypeAlias = tuple[dict[str, Any], str, Any]
"""The dict that holds an attribute, its name, and a value for it."""

MODULE_INTERNALS = frozenset(vars(nn.Module()))


class AttributeSnapshot:
    """Snapshot of the attributes of a unit's modules before it runs.

    Args:
        module: the unit.
    """

    def __init__(self, module: nn.Module):
        self._parts = dict(walk.named_modules(module))
        self._before = {path: attributes_now(part) for path, part in self._parts.items()}
        self._lists = {
            (path, name): (value, ContainerSnapshot(value))
            for path, held in self._before.items()
            for name, value in held.items()
            if isinstance(value, list | dict | deque) and name not in MODULE_INTERNALS
        }

    def assigned(self) -> dict[AttributeKey, Any]:
        """The attributes that were assigned values with tensors since, in the same order on every rank."""
        found = {
            (path, name): value
            for path, part in self._parts.items()
            for name, value in attributes_now(part).items()
            if value is not self._before[path].get(name, MISSING) and tensors_in(value)
        }
        return {key: found[key] for key in sorted(found)}

    def has_changed(self) -> bool:
        """Whether an attribute is another object now, tensor or not; changed contents of a container do not count."""
        return any(
            value is not self._before[path].get(name, MISSING) or len(held) != len(self._before[path])
            for path, part in self._parts.items()
            for held in [attributes_now(part)]
            for name, value in held.items()
        )

    def before(self, keys: Iterable[AttributeKey]) -> "list[AttributeSlot]":
        """The slots of these attributes, with their values before; without buffers."""
        slots = [(self._parts[path].__dict__, name, self._before[path].get(name, MISSING)) for path, name in keys]
        return [
            slot for slot, (path, name) in zip(slots, keys, strict=True) if name not in buffers_of(self._parts[path])
        ]

    def appended(self) -> dict[AttributeKey, Any]:
        """The lists and dicts that tensors were added to, with their changes (see
        :meth:`ContainerSnapshot.changes`)."""
        appended = {key: given.changes([0])[0] for key, (_, given) in self._lists.items() if given.changed()}
        return {key: change for key, change in appended.items() if tensors_in(change)}

    def restore_lists(self) -> None:
        """Take out again what was added to lists and dicts since."""
        for _, given in self._lists.values():
            given.restore()

    def change(self, function: Callable[[Any], Any]) -> None:
        """Replace each tensor that was assigned or added since by ``function(tensor)``."""
        for (path, name), value in self.assigned().items():
            owning_dict(self._parts[path], name)[name] = pytree.tree_map(function, value)
        for key, change in self.appended().items():
            self._lists[key][1].repeat([0], [pytree.tree_map(function, change)])


class AttributeDelta:
    """The attributes that a unit's call assigns or appends to, for repeating that on other stages.

    Args:
        module: the unit.
        keys: the attributes that it assigns.
        appended: the lists and dicts that it appends to.
    """

    def __init__(self, module: nn.Module, keys: Iterable[AttributeKey], appended: Iterable[AttributeKey]):
        self._module = module
        self._keys = tuple(keys)
        self._lists = {key: ContainerSnapshot(self._value(key)) for key in appended}
        self._replaced = Replacements()

    def _value(self, key: AttributeKey) -> Any:
        return attributes_now(self._module.get_submodule(key[0])).get(key[1])

    def now(self) -> tuple[dict[AttributeKey, Any], dict[AttributeKey, Any]]:
        """The attributes' values now, and the changes of lists and dicts."""
        changes = {key: (given.changes([0]) or [None])[0] for key, given in self._lists.items()}
        return {key: self._value(key) for key in self._keys}, changes

    def repeat(self, values: Mapping[AttributeKey, Any], changes: Mapping[AttributeKey, Any]) -> None:
        """Apply the result of :meth:`now` of another rank's call."""
        for key, value in values.items():
            self._replaced.put(owning_dict(self._module.get_submodule(key[0]), key[1]), key[1], value)
        for key, change in changes.items():
            self._lists[key].repeat([0], [change])

    def restore(self) -> None:
        """Undo :meth:`repeat`."""
        self._replaced.restore()
        for given in self._lists.values():
            given.restore()


def attributes_now(module: nn.Module) -> dict[str, Any]:
    """A module's own attributes, buffers among them."""
    return buffers_of(module) | vars(module)


def owning_dict(module: nn.Module, name: str) -> dict[str, Any]:
    """The dict that holds an attribute of a module."""
    return buffers_of(module) if name in buffers_of(module) else vars(module)
