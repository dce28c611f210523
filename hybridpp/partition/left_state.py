"""State that a forward leaves on modules for the next one: which stages hold it then, and which read it."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hybridpp.code_owner import is_own_module
from hybridpp.errors import PartitionError
from hybridpp.nn import walk
from hybridpp.nn.contents import Contents, has_attributes, is_container, is_same
from hybridpp.nn.snapshot import MISSING, Holder, reachable
from hybridpp.nn.torch_private import buffers_of, pytree, version_or_none
from hybridpp.partition.module_outputs import MODULE_INTERNALS, attributes_now

# From an attribute to what it holds: an object, a dict in it, what that holds.
_NUM_LEVELS = 3
_NUMBERS = (bool, int, float, str)
_CHANGEABLE = (list, dict, set, deque)

LeftKey = tuple[str, str]
"""An attribute that a forward leaves changed: the module's name in the model, and its own."""

AttributeWatcher = Callable[[nn.Module, str, bool], None]
"""Is told of a read of a module's attribute, or of a write."""

FilledContainers = dict[LeftKey, Any]
"""What containers hold, by the attribute that they are."""


class _Held(NamedTuple):
    """What an attribute holds: its value, what the containers and objects in it hold, and versions of tensors."""

    value: Any
    inside: list[tuple[Holder, Contents]]
    versions: list[tuple[Tensor, int | None]]

    @classmethod
    def of(cls, value: Any) -> "_Held":
        inside = reachable([value], _NUM_LEVELS)[0] if _may_change(value) else []
        tensors = [value, *(held for _, contents in inside for held in _values(contents))]
        return cls(value, inside, [(one, version_or_none(one)) for one in tensors if isinstance(one, Tensor)])

    def is_now(self, value: Any) -> bool:
        """Whether a value is what this was, and nothing in it was written to since."""
        return _is_same_value(value, self.value) and not self.is_written

    @property
    def is_written(self) -> bool:
        """Whether something in it was written to since."""
        return any(version_or_none(tensor) != version for tensor, version in self.versions) or any(
            not _is_same_but_for_settings(holder.read(holder.thing), contents) for holder, contents in self.inside
        )

    def equals(self, other: "_Held") -> bool:
        """Whether both were the same."""
        if not _is_same_value(self.value, other.value):
            return False
        if len(self.inside) != len(other.inside) or len(self.versions) != len(other.versions):
            return False
        inside, versions = zip(self.inside, other.inside, strict=True), zip(self.versions, other.versions, strict=True)
        return all(one.thing is two.thing and is_same(held, then) for (one, held), (two, then) in inside) and all(
            one is two and now == then for (one, now), (two, then) in versions
        )

    @property
    def is_of_tensors(self) -> bool:
        """Whether it is a container of tensors alone, which may be changed."""
        return (
            isinstance(self.value, _CHANGEABLE)
            and len(self.inside) == 1
            and all(isinstance(held, Tensor) for held in _values(self.inside[0][1]))
        )

    def tensors(self) -> list[Tensor]:
        """Those in it."""
        return [tensor for tensor, _ in self.versions]


class AttributesBefore:
    """The attributes of a model's modules before a forward. Those of torch's own modules are theirs.

    Args:
        model: before the forward.
    """

    def __init__(self, model: nn.Module):
        self._parts = {
            path: part
            for path, part in walk.named_modules(model)
            if path == "" or not type(part).__module__.startswith("torch.")
        }
        known: dict[int, _Held] = {}  # a model's configuration is an attribute of most of its modules
        self._held = {
            path: {name: _known(value, known) for name, value in own_attributes(part).items()}
            for path, part in self._parts.items()
        }

    def left(self) -> tuple[LeftKey, ...]:
        """The attributes that the forward has changed; call it when it has ended."""
        found = []
        for path, part in self._parts.items():
            now, held = own_attributes(part), self._held[path]
            for name in dict.fromkeys((*now, *held)):
                before, value = held.get(name), now.get(name, MISSING)
                if before is None or not before.is_now(value):
                    found.append((path, name))
        return tuple(found)

    def filled(self) -> FilledContainers:
        """What the changed containers of tensors hold; call it when the forward has ended."""
        found = {}
        for key in self.left():
            value = own_attributes(self._parts[key[0]]).get(key[1], MISSING)
            if _Held.of(value).is_of_tensors and value:
                found[key] = value.copy()
        return found


def fill_again(model: nn.Module, filled: FilledContainers) -> list[Tensor]:
    """Put what a forward left into containers of a model, which has them as they were before it; the tensors."""
    for (path, name), contents in filled.items():
        value = attributes_now(walk.submodule(model, path)).get(name, MISSING)
        if type(value) is type(contents):
            value.clear()
            value.update(contents) if isinstance(value, dict | set) else value.extend(contents)
    return [tensor for contents in filled.values() for tensor in _values(contents)]


class _Read(NamedTuple):
    """A read of what the forward before has left: by the call with this index, or on the way to it."""

    key: LeftKey
    call: int
    in_unit: bool


class LeftByContainers(NamedTuple):
    """What container code leaves for the next forward.

    Attributes:
        read: the attributes that the next forward reads before they are set again.
        replaced: those of them that get another value, while what they held stays as it was; no buffers.
        tensors: those that the last stage must have: of these attributes, and of buffers, which are saved.
    """

    read: tuple[LeftKey, ...] = ()
    replaced: tuple[LeftKey, ...] = ()
    tensors: Sequence[Tensor] = ()


class LeftState:
    """Finds, in one trace, which stages hold what the forward left, and which read it before it is set again.

    Args:
        model: before the forward.
        keys: the attributes that it leaves changed.
        cuts: the calls after which it is cut, in order.
    """

    def __init__(self, model: nn.Module, keys: Sequence[LeftKey], cuts: Sequence[tuple[str, int]]):
        self._model = model
        self._parts = dict(walk.named_modules(model))
        self._keys = [key for key in keys if key[0] in self._parts]
        self._is_looking = False
        self._cuts = cuts
        self._before = self._now()
        self._latest = self._before
        self._at_cuts: list[dict[LeftKey, _Held]] = []
        self._ends: list[int] = []
        self._writers: dict[LeftKey, set[int]] = {key: set() for key in self._keys}
        self._after_units: dict[LeftKey, _Held] = {}
        self._reads: list[_Read] = []
        self._of_tensors = {key for key, held in self._before.items() if held.is_of_tensors}
        self._holders: dict[int, list[LeftKey]] = {}
        for key in self._of_tensors:
            for tensor in self._before[key].tensors():
                self._holders.setdefault(id(tensor), []).append(key)

    def _now(self) -> dict[LeftKey, _Held]:
        self._is_looking = True  # to ask for a tensor's version is no use of it
        try:
            return {key: _Held.of(self._value(key)) for key in self._keys}
        finally:
            self._is_looking = False

    def _value(self, key: LeftKey) -> Any:
        return attributes_now(self._parts[key[0]]).get(key[1], MISSING)

    def begin_call(self, arguments: Iterable[Tensor], index: int) -> None:
        """Record what container code has set before a unit runs, and which arguments it takes from what was left."""
        self._note_uses(arguments, index, False)
        self._latest = self._now()

    def end_call(self, call: tuple[str, int], index: int) -> None:
        """Record what a unit has set, and where a stage leaves the forward."""
        now = self._now()
        for key in self._keys:
            if not now[key].equals(self._latest[key]):
                self._writers[key].add(index)
                self._after_units[key] = now[key]
        self._latest = now
        while len(self._at_cuts) < len(self._cuts) and call == self._cuts[len(self._at_cuts)]:
            self._at_cuts.append(now)
            self._ends.append(index)

    def _note_read(self, module: nn.Module, name: str, call: int, in_unit: bool) -> None:
        """Record a read of an attribute, if it is still what the forward before has left."""
        for key in self._keys:
            is_of_key = key[1] == name and self._parts[key[0]] is module and key not in self._of_tensors
            if is_of_key and self._before[key].is_now(self._value(key)):
                self._reads.append(_Read(key, call, in_unit))

    def _note_uses(self, tensors: Iterable[Tensor], call: int, in_unit: bool) -> None:
        """Record uses of tensors in containers that the forward before has left.

        To ask for a container of tensors is no use of them: it may be cleared, or its entries set again.
        """
        for tensor in () if self._is_looking else tensors:
            for key in self._holders.get(id(tensor), ()):
                read = _Read(key, call, in_unit)
                if read not in self._reads:
                    self._reads.append(read)

    def check(self, calls: Sequence[str], is_reset: Sequence[set[LeftKey]]) -> LeftByContainers:
        """Refuse state that a stage would read though it has an older one; call it after the forward.

        Args:
            calls: the units that were called.
            is_reset: the attributes that each stage resets when it leaves the forward.

        Raises:
            PartitionError: there is such state.
        """
        end, stages = self._now(), self._stages(calls)
        last = len(self._at_cuts)
        for key, call, in_unit in self._reads:
            stage, writers = stages[call], {stages[index] for index in self._writers[key]}
            if writers and not (stage in writers and (in_unit or len(writers) == 1)):
                latest = max(self._writers[key])
                raise PartitionError(
                    self._text(key, stage, f"unit {calls[latest]!r} sets it, on stage {stages[latest]}")
                )
            is_last_writer = bool(writers) and end[key].equals(self._after_units[key])
            is_here = stage == last or key in is_reset[stage] or end[key].equals(self._at_cuts[stage][key])
            if is_last_writer or is_here:
                continue
            where = f"it is set after {self._cuts[stage][0]!r}, where that stage has left the forward"
            raise PartitionError(self._text(key, stage, where))
        by_containers = [key for key in self._keys if not self._writers[key] and not self._is_done_once(key, end[key])]
        read = {key for key, _, _ in self._reads}
        kept = [key for key in by_containers if key in read or key[1] in buffers_of(self._parts[key[0]])]
        left_to_read = tuple(key for key in by_containers if key in read)
        replaced = tuple(key for key in left_to_read if self._is_replaced(key, end[key]))
        return LeftByContainers(left_to_read, replaced, [one for key in kept for one in end[key].tensors()])

    def _is_replaced(self, key: LeftKey, end: _Held) -> bool:
        """Whether an attribute (no buffer: files hold those) has another value, and the one before is as it was."""
        before = self._before[key]
        is_buffer = key[1] in buffers_of(self._parts[key[0]])
        return not is_buffer and not _is_same_value(before.value, end.value) and not before.is_written

    def _is_done_once(self, key: LeftKey, end: _Held) -> bool:
        """Whether an attribute says that the first forward has done something, as transformers does where it registers
        hooks: a flag that was not there before. Code that runs again finds it set."""
        return self._before[key].value is MISSING and end.value is True

    def _stages(self, calls: Sequence[str]) -> list[int]:
        """The stage of each call, and of what follows the last one."""
        return [sum(end < index for end in self._ends) for index in range(len(calls) + 1)]

    def _text(self, key: LeftKey, stage: int, where: str) -> str:
        kind = type(self._model).__name__
        holder = f"{key[0]!r} of {kind}" if key[0] else kind
        return (
            f"stage {stage} reads the attribute {key[1]!r} of {holder} that the forward before has left, but {where}: "
            "it would find an older one. Keep it in the block that reads it, set it where it is read, pass it in as an "
            "input and return it, or use pp_size=1."
        )

    @contextmanager
    def watching(self, current_call: Callable[[], tuple[int, bool]]) -> Iterator[None]:
        """Inside, reads of the attributes are recorded; ``current_call()`` gives the call, and whether a unit runs."""

        def tell(module: nn.Module, name: str, is_write: bool) -> None:
            if not is_write:
                self._note_read(module, name, *current_call())

        watched = {(type(self._parts[path]), name) for path, name in self._keys}
        try:
            for kind, name in watched:
                WatchedAttribute.put(kind, name).watchers.append(tell)
            with _Uses(lambda tensors: self._note_uses(tensors, *current_call())):
                yield
        finally:
            for kind, name in watched:
                WatchedAttribute.drop(kind, name, tell)


class _Uses(TorchFunctionMode):
    """Tells which tensors functions are called with."""

    def __init__(self, tell: Callable[[Iterable[Tensor]], None]):
        super().__init__()
        self._tell = tell

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._tell([leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)])
        return func(*args, **kwargs)


class WatchedAttribute:
    """Stands for an attribute of a class, and tells whose is read or set: ``watcher(module, name, is_write)``.

    Everything else is as without it: what a module holds counts, then its buffers, then what its class has. In-process
    ranks, which share classes, share it.

    Args:
        name: of the attribute.
        own: what the class itself has there; ``MISSING``: nothing.
    """

    def __init__(self, name: str, own: Any):
        self._name, self.own = name, own
        self.watchers: list[AttributeWatcher] = []

    @classmethod
    def put(cls, kind: type, name: str) -> "WatchedAttribute":
        """That of a class, which has one from now on."""
        own = vars(kind).get(name, MISSING)
        if isinstance(own, cls):
            return own
        made = cls(name, own)
        setattr(kind, name, made)
        return made

    @classmethod
    def drop(cls, kind: type, name: str, watcher: AttributeWatcher) -> None:
        """End a watch; with the last one, the class is as before."""
        watched = vars(kind).get(name)
        if not isinstance(watched, cls) or watcher not in watched.watchers:
            return
        watched.watchers.remove(watcher)
        if watched.watchers:
            return
        if watched.own is MISSING:
            delattr(kind, name)
        else:
            setattr(kind, name, watched.own)

    def __get__(self, module: Any, kind: type | None = None) -> Any:
        if module is None:
            return self._of_class(kind, None)
        for tell in tuple(self.watchers):
            tell(module, self._name, False)
        held = attributes_now(module)
        return held[self._name] if self._name in held else self._of_class(type(module), module)

    def _of_class(self, kind: Any, module: Any) -> Any:
        for base in kind.__mro__:
            found = vars(base).get(self._name, MISSING)
            found = found.own if isinstance(found, WatchedAttribute) else found
            if found is not MISSING:
                return found.__get__(module, kind) if hasattr(found, "__get__") else found
        # Modules are asked once more, by their __getattr__.
        raise AttributeError(self._name)

    def __set__(self, module: Any, value: Any) -> None:
        for tell in tuple(self.watchers):
            tell(module, self._name, True)
        vars(module)[self._name] = value

    def __delete__(self, module: Any) -> None:
        try:
            del vars(module)[self._name]
        except KeyError:
            raise AttributeError(self._name) from None


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """A module's attributes but for those of torch and of this library."""
    return {
        name: value
        for name, value in attributes_now(module).items()
        if name not in MODULE_INTERNALS and name != "forward" and not is_own_module(type(value).__module__)
    }


def _is_same_value(one: Any, two: Any) -> bool:
    return one is two or (isinstance(one, _NUMBERS) and type(one) is type(two) and one == two)


def _is_same_but_for_settings(now: Contents, before: Contents) -> bool:
    """Whether nothing has changed but that there are plain values by name where nothing was, or None.

    A configuration gets such when it is first used (``problem_type``). Whatever becomes of them later is a change.
    """
    if is_same(now, before):
        return True
    if not isinstance(now, dict) or not isinstance(before, dict) or not before.keys() <= now.keys():
        return False
    changed = [name for name, value in now.items() if value is not before.get(name, MISSING)]
    return all(
        isinstance(name, str) and before.get(name) is None and isinstance(now[name], (*_NUMBERS, type(None)))
        for name in changed
    )


def _known(value: Any, known: dict[int, _Held]) -> _Held:
    if id(value) not in known:
        known[id(value)] = _Held.of(value)
    return known[id(value)]


def _may_change(value: Any) -> bool:
    return is_container(value) or isinstance(value, tuple) or has_attributes(value)


def _values(contents: Contents) -> Any:
    return contents.values() if isinstance(contents, dict) else contents
