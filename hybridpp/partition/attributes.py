"""What a unit leaves on its own modules for glue to find: ``self.aux_loss = ...``, ``self.losses.append(...)``."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from torch import nn
from torch.utils import _pytree as pytree

from hybridpp.partition.structure import Given, tensors_in

Key: TypeAlias = tuple[str, str]
"""An attribute: the module's name inside the unit, and its own."""

Slot: TypeAlias = tuple[dict[str, Any], str, Any]
"""Where an attribute is kept, its name, and a value for it."""

_MISSING = object()
_OF_MODULES = frozenset(vars(nn.Module()))


class Attributes:
    """The attributes of a unit's modules, as they are before it runs.

    Args:
        module: the unit.
    """

    def __init__(self, module: nn.Module):
        self._parts = dict(module.named_modules())
        self._before = {path: _attributes(part) for path, part in self._parts.items()}
        self._lists = {
            (path, name): (value, Given(value))
            for path, held in self._before.items()
            for name, value in held.items()
            if isinstance(value, list | dict | deque) and name not in _OF_MODULES
        }

    def set_since(self) -> dict[Key, Any]:
        """Those that are something else now, with tensors in it; in one order on every rank."""
        found = {
            (path, name): value
            for path, part in self._parts.items()
            for name, value in _attributes(part).items()
            if value is not self._before[path].get(name, _MISSING) and tensors_in(value)
        }
        return {key: found[key] for key in sorted(found)}

    def before(self, keys: Iterable[Key]) -> "list[Slot]":
        """Where these are kept, and what they were; without buffers."""
        slots = [(self._parts[path].__dict__, name, self._before[path].get(name, _MISSING)) for path, name in keys]
        return [slot for slot, (path, name) in zip(slots, keys, strict=True) if name not in self._parts[path]._buffers]

    def added_to(self) -> dict[Key, Any]:
        """The lists and dicts that got tensors, with what they hold now in terms of what they held before."""
        added = {key: given.changes([0])[0] for key, (_, given) in self._lists.items() if given.changed()}
        return {key: change for key, change in added.items() if tensors_in(change)}

    def change(self, function: Callable[[Any], Any]) -> None:
        """Put ``function(tensor)`` in the place of each tensor that was set or added since."""
        for (path, name), value in self.set_since().items():
            _place(self._parts[path], name)[name] = pytree.tree_map(function, value)
        for key, change in self.added_to().items():
            self._lists[key][1].repeat([0], [pytree.tree_map(function, change)])


class Leavings:
    """The attributes that a call was seen to set or add to, for another call of the same unit.

    Args:
        module: the unit.
        keys: of those it sets.
        added: of the lists and dicts that it adds to.
    """

    def __init__(self, module: nn.Module, keys: Iterable[Key], added: Iterable[Key]):
        self._module = module
        self._keys = tuple(keys)
        self._lists = {key: Given(self._value(key)) for key in added}
        self._undo: list[Slot] = []

    def _value(self, key: Key) -> Any:
        return _attributes(self._module.get_submodule(key[0])).get(key[1])

    def now(self) -> tuple[dict[Key, Any], dict[Key, Any]]:
        """What they are now."""
        changes = {key: (given.changes([0]) or [None])[0] for key, given in self._lists.items()}
        return {key: self._value(key) for key in self._keys}, changes

    def repeat(self, values: Mapping[Key, Any], changes: Mapping[Key, Any]) -> None:
        """Do what :meth:`now` told of a call elsewhere."""
        for key, value in values.items():
            place = _place(self._module.get_submodule(key[0]), key[1])
            self._undo.append((place, key[1], place.get(key[1], _MISSING)))
            place[key[1]] = value
        for key, change in changes.items():
            self._lists[key].repeat([0], [change])

    def restore(self) -> None:
        """Undo :meth:`repeat`."""
        put_back(reversed(self._undo))
        for given in self._lists.values():
            given.restore()


def put_back(slots: Iterable[Slot]) -> None:
    """Give attributes the values that go with them."""
    for place, name, value in slots:
        if value is _MISSING:
            place.pop(name, None)
        else:
            place[name] = value


def _attributes(module: nn.Module) -> dict[str, Any]:
    return module._buffers | vars(module)


def _place(module: nn.Module, name: str) -> dict[str, Any]:
    return module._buffers if name in module._buffers else vars(module)
