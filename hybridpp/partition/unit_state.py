"""State that a unit keeps on its own modules, restored when one of its calls is recomputed."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from torch import Tensor, nn

from hybridpp.errors import PartitionError
from hybridpp.nn import walk
from hybridpp.nn.snapshot import Snapshot
from hybridpp.nn.torch_private import buffers_of, version_or_none
from hybridpp.partition.module_outputs import MODULE_INTERNALS, AttributeKey, owning_dict

_Mode: TypeAlias = tuple[bool, ...]


class UnitStateRecorder:
    """Records the state of a unit at its calls.

    Assigned attributes are cheap to record. Tensors that are written in place must be copied beforehand: the first call
    (in each mode of the unit's modules, training or evaluation) copies all, later calls those that it wrote to.

    Args:
        name: of the unit.
        module: the unit.
    """

    def __init__(self, name: str, module: nn.Module):
        self.name = name
        self.module = module
        self._written: dict[_Mode, frozenset[AttributeKey]] = {}
        self._writes_deeply: dict[_Mode, bool] = {}

    def begin(self) -> "UnitState":
        """Record the start of a call; :meth:`end` must follow when it is over."""
        mode = tuple(part.training for part in walk.modules(self.module))
        return UnitState(self.module, self._written.get(mode), self._writes_deeply.get(mode, True))

    def end(self, state: "UnitState") -> None:
        """Record the end of that call.

        Raises:
            PartitionError: it wrote to tensors whose values before are not known.
        """
        mode = tuple(part.training for part in walk.modules(self.module))
        written, known = state.written(), self._written.get(mode)
        if state.wrote_to_uncopied() or (known is not None and not written <= known):
            raise PartitionError(
                f"unit {self.name!r} writes in place to a tensor that it keeps, so it cannot be recomputed. Give the "
                "attribute a new tensor, or leave gradient_checkpoint_config out."
            )
        if known is None:
            self._written[mode], self._writes_deeply[mode] = written, state.wrote_deeply()
        state.keep(written)


class UnitState:
    """State of a unit's modules at the start of a call.

    Args:
        module: the unit.
        written: the tensors among their attributes to copy; None: all.
        deeply: whether objects among their attributes are recorded, too.
    """

    def __init__(self, module: nn.Module, written: Iterable[AttributeKey] | None, deeply: bool):
        self._module = module
        self._parts = dict(walk.named_modules(module))
        self._attributes = Snapshot.of_modules(module)
        self._tensors = {
            (path, name): value
            for path, part in self._parts.items()
            for held in (vars(part), buffers_of(part))
            for name, value in held.items()
            if isinstance(value, Tensor)
        }
        self._versions = {key: version_or_none(tensor) for key, tensor in self._tensors.items()}
        self._copies = {
            key: self._tensors[key].detach().clone()
            for key in (self._tensors if written is None else written)
            if key in self._tensors
        }
        self._objects = Snapshot.reachable_from(self._values()) if deeply else None
        self._deep = [(tensor, version_or_none(tensor)) for tensor in self._objects.tensors()] if self._objects else []

    def written(self) -> frozenset[AttributeKey]:
        """The attributes whose tensors were written to in place since then."""
        return frozenset(key for key, tensor in self._tensors.items() if version_or_none(tensor) != self._versions[key])

    def wrote_deeply(self) -> bool:
        """Whether the contents of objects among the attributes have changed."""
        return self._objects is not None and self._objects.has_changed()

    def wrote_to_uncopied(self) -> bool:
        """Whether a tensor in an object among the attributes was written to in place."""
        return any(version_or_none(tensor) != version for tensor, version in self._deep)

    def keep(self, written: frozenset[AttributeKey]) -> None:
        """Drop copies of tensors that were not written to."""
        self._copies = {key: copy for key, copy in self._copies.items() if key in written}

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, the state is restored; buffers are copies, because not all writes to them are detected."""
        later = Snapshot.of_modules(self._module), self._objects and Snapshot.reachable_from(self._values())
        self._attributes.restore()
        if self._objects is not None:
            self._objects.restore()
        self._put_copies()
        try:
            yield
        finally:
            if later[1] is not None:
                later[1].restore()
            later[0].restore()

    def _values(self) -> list[Any]:
        """Attributes that may be objects, or hold some."""
        return [
            value
            for part in self._parts.values()
            for name, value in vars(part).items()
            if name not in MODULE_INTERNALS and not isinstance(value, Tensor)
        ]

    def _put_copies(self) -> None:
        for part in self._parts.values():
            for name, buffer in buffers_of(part).items():
                buffers_of(part)[name] = buffer.clone() if isinstance(buffer, Tensor) else buffer
        for (path, name), copy in self._copies.items():
            owning_dict(self._parts[path], name)[name] = copy.clone()
