"""Attributes that a forward sets before a cut and resets after it, for stages that leave the forward at the cut."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from hybridpp.errors import PartitionError
from hybridpp.nn import walk
from hybridpp.nn.contents import Contents, is_container, is_same, items_of, put_items
from hybridpp.nn.snapshot import MISSING, put_entry
from hybridpp.partition.module_outputs import MODULE_INTERNALS, attributes_now, owning_dict

UnitCallKey: TypeAlias = tuple[str, int]
"""A unit's name, and the number of its earlier calls."""

_AS_BEFORE = object()
_NUMBERS = (bool, int, float, str)


class AttributeReset(NamedTuple):
    """An attribute that the forward set, or a container that it filled, before a cut, and reset after it.

    Attributes:
        module: by name.
        name: of the attribute.
        value: its value at the end; :meth:`as_before` means its value at the start of the forward.
    """

    module: str
    name: str
    value: Any

    @property
    def as_before(self) -> bool:
        """Whether the attribute and its contents are the same at the end as at the start."""
        return self.value is _AS_BEFORE


class _AttributeValue(NamedTuple):
    """An attribute's value, and its contents if it is a container."""

    value: Any
    contents: Contents | None = None

    def equals(self, other: "_AttributeValue") -> bool:
        if self.contents is not None and other.contents is not None:
            return type(self.value) is type(other.value) and is_same(self.contents, other.contents)
        if self.value is other.value:
            return True
        return isinstance(self.value, _NUMBERS) and type(self.value) is type(other.value) and self.value == other.value

    @property
    def is_constant(self) -> bool:
        """Whether it is a typical reset value; a number is not, as it may be a count."""
        return (
            self.value is MISSING
            or self.value is None
            or isinstance(self.value, bool | str)
            or self.contents in ([], {})
        )

    @property
    def is_cleared(self) -> bool:
        """Whether there is nothing."""
        return self.value is MISSING or self.value is None or self.contents in ([], {})


class _State:
    """The attributes of a module, and what the containers among them hold."""

    def __init__(self, module: nn.Module):
        now = attributes_now(module)
        self.attributes = {name: value for name, value in now.items() if name not in MODULE_INTERNALS}
        self._contents = {name: items_of(value) for name, value in self.attributes.items() if is_container(value)}

    def __getitem__(self, name: str) -> _AttributeValue:
        return _AttributeValue(self.attributes.get(name, MISSING), self._contents.get(name))

    def equals(self, other: "_State") -> bool:
        """Whether both hold the very same objects."""
        return is_same(self.attributes, other.attributes) and all(
            map(is_same, self._contents.values(), other._contents.values())
        )


class ResetSearch:
    """Finds, in one trace, the attributes that are reset after each cut.

    Args:
        model: before the trace.
        units: names of its units.
        cuts: the calls after which it is cut, in order.
    """

    def __init__(self, model: nn.Module, units: Iterable[str], cuts: Sequence[UnitCallKey]):
        self._cuts = cuts
        self._parts = dict(walk.named_modules(model)) if cuts else {}
        self._before = {path: _State(part) for path, part in self._parts.items()}
        self._inside = {part for unit in units for part in walk.modules(walk.submodule(model, unit))} if cuts else set()
        self._at_cuts: list[dict[tuple[str, str], _AttributeValue]] = []
        self._assigned: dict[int, Any] = {}
        self._read: set[int] = set()

    def tensors(self) -> list[Tensor]:
        """The attributes of units that are tensors before the forward."""
        inside = (state for path, state in self._before.items() if self._parts[path] in self._inside)
        return [value for state in inside for value in state.attributes.values() if isinstance(value, Tensor)]

    def note_call(self, call: UnitCallKey, assigned: Mapping[Any, Any]) -> None:
        """Record the end of a call, and the attributes that the unit assigned."""
        if not self._cuts:
            return
        self._assigned.update({id(value): value for value in assigned.values()})
        while len(self._at_cuts) < len(self._cuts) and call == self._cuts[len(self._at_cuts)]:
            self._at_cuts.append(self._changed())

    def note_read(self, tensors: Iterable[int]) -> None:
        """Record tensors that a unit used, by ``id``."""
        self._read.update(tensors)

    def found(self) -> tuple[tuple[AttributeReset, ...], ...]:
        """The resets of the rest of the forward, per cut; call it after the forward.

        Raises:
            PartitionError: container code set an attribute to a new tensor, which only that code can compute.
        """
        if not self._cuts:
            return ()
        now = {path: _State(part) for path, part in self._parts.items()}
        cleared = self._cleared(now)
        return tuple(
            tuple(
                AttributeReset(*key, value)
                for key, held in (cleared | changed).items()
                if (value := self._value_after(cut, key, held, now[key[0]][key[1]])) is not held
            )
            for cut, changed in zip(self._cuts, self._at_cuts, strict=False)
        )

    def _cleared(self, now: Mapping[str, _State]) -> dict[tuple[str, str], _AttributeValue]:
        """What was there before the forward and is not at its end (a script set it for one call), as it was before."""
        return {
            (path, name): before[name]
            for path, before in self._before.items()
            if not now[path].equals(before)
            for name in before.attributes
            if now[path][name].is_cleared and not now[path][name].equals(before[name])
        }

    def _value_after(self, cut: UnitCallKey, key: tuple[str, str], held: _AttributeValue, end: _AttributeValue) -> Any:
        """The value to replace ``held`` by; ``held`` itself if there is no reset."""
        before = self._before[key[0]][key[1]]
        if end.equals(before):
            return _AS_BEFORE
        if end.equals(held):
            return held
        if end.is_constant:
            return end.value
        in_unit = self._parts[key[0]] in self._inside
        is_read = not isinstance(before.value, Tensor) or id(before.value) in self._read
        if in_unit and is_read and isinstance(end.value, Tensor) and id(end.value) not in self._assigned:
            raise PartitionError(
                f"container code puts a new tensor into the attribute {key[1]!r} of {key[0]!r} after the cut at "
                f"{cut[0]!r}, where the stage that calls the unit has left the forward: its next call would find the "
                "old one. Do that in the unit or at the start of the forward, or use pp_size=1."
            )
        return held

    def _changed(self) -> dict[tuple[str, str], _AttributeValue]:
        changed = {}
        for path, part in self._parts.items():
            before, now = self._before[path], _State(part)
            if now.equals(before):
                continue
            for name in before.attributes | now.attributes:
                held = now[name]
                if not held.equals(before[name]):
                    changed[path, name] = held
        return changed


class AttributeResetter:
    """Applies the resets of the rest of the forward to a stage's model when the stage leaves the forward.

    Args:
        model: before the forward.
        resets: of the cut where the stage leaves.
    """

    def __init__(self, model: nn.Module, resets: Sequence[AttributeReset]):
        self._held: list[tuple[nn.Module, str, Contents | None, Any]] = []
        for reset in resets:
            part = model.get_submodule(reset.module)
            value = reset.value if reset.value is MISSING else copy.copy(reset.value)
            value = attributes_now(part).get(reset.name, MISSING) if reset.as_before else value
            self._held.append((part, reset.name, items_of(value) if is_container(value) else None, value))

    def put(self) -> None:
        """Apply the resets."""
        for part, name, contents, value in self._held:
            put_entry(owning_dict(part, name), name, value)
            if contents is not None:
                put_items(value, contents)
