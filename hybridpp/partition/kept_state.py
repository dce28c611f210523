"""State that a model's forward keeps for its next call: found in the first two calls, which micro-batches make."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridpp.nn import walk
from hybridpp.nn.metadata_functions import METADATA_FUNCTIONS
from hybridpp.nn.names import qualified
from hybridpp.nn.snapshot import MISSING, holders
from hybridpp.nn.torch_private import (
    NormWithStatistics,
    buffers_of,
    has_no_data,
    parameters_of,
    pytree,
    transient_buffers_of,
    version_or_none,
)
from hybridpp.nn.watcher import WatchingMode
from hybridpp.partition.compiled import is_compiled, is_compiled_by_script
from hybridpp.partition.left_state import LeftKey, WatchedAttribute, own_attributes

# From an attribute to what it holds: an object, a dict in it, what that holds.
_NUM_LEVELS = 3
_NUMBERS = (bool, int, float)
_PLAIN = (*_NUMBERS, str, type(None))

# By their names: what gives the same values as its first argument, on its memory or not.
_SAME_MEMORY = frozenset({"detach", "data", "view_as", "alias"})
_PARTS = frozenset(
    {"view", "reshape", "transpose", "permute", "squeeze", "unsqueeze", "expand", "expand_as", "flatten", "select"}
    | {"narrow", "chunk", "split", "unbind", "__getitem__", "T", "mT", "t", "contiguous", "unflatten"}
)
_COPIES = frozenset({"clone", "to", "float", "double", "half", "bfloat16", "cpu", "cuda", "type", "type_as"})
_ADDS = frozenset({"add", "add_", "__add__", "__iadd__", "__radd__"})
_OVERWRITES = frozenset({"data=", "copy_", "zero_", "fill_", "set_", "normal_", "uniform_", "bernoulli_", "random_"})
_PART_WRITES = frozenset({"__setitem__"})
_IN_PLACE = frozenset(
    {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__"}
) | frozenset({"__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__setitem__", "data="})
# Often without an effect.
_CLAMPS = frozenset({"clamp_", "clip_", "clamp_min_", "clamp_max_", "renorm_"})
# What needs none of the values.
_ASIDE = frozenset(
    {"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_ones"}
    | {"new_empty", "new_full", "new_tensor", "data_ptr", "untyped_storage", "stride", "storage_offset", "get_device"}
    | {"is_contiguous", "requires_grad_", "requires_grad=", "detach_", "grad", "grad=", "retain_grad", "__hash__"}
    | {"__repr__", "__str__", "__format__", "record_stream", "register_hook"}
)


class KeptValue(NamedTuple):
    """What a forward keeps for its next call, and reads there.

    Attributes:
        name: of the attribute, buffer or parameter in the model.
        is_shared: whether replicas take the first one's, as of persistent buffers and frozen parameters.
        shape: of a tensor with an entry for each sample of a micro-batch; else empty.
        is_set_once: whether the first call alone has set it: a trained parameter.
    """

    name: str
    is_shared: bool
    shape: tuple[int, ...] = ()
    is_set_once: bool = False


class _Entry(NamedTuple):
    """A value, and the tensors that can be reached from it with their versions."""

    value: Any
    tensors: list[tuple[Tensor, int | None]]

    @classmethod
    def of(cls, value: Any, known: dict[int, list[Tensor]]) -> "_Entry":
        if not isinstance(value, Tensor) and id(value) not in known:
            known[id(value)] = list(_tensors_in(value, _NUM_LEVELS))
        found = [value] if isinstance(value, Tensor) else known[id(value)]
        return cls(value, [(one, version_or_none(one)) for one in found])

    def has_same_number(self, other: "_Entry | None") -> bool:
        """Whether neither is a number, or both are the same."""
        then = MISSING if other is None else other.value
        if not isinstance(self.value, _NUMBERS) and not isinstance(then, _NUMBERS):
            return True
        return type(self.value) is type(then) and bool(self.value == then)

    def has_same_tensors(self, other: "_Entry | None") -> bool:
        """Whether both have the very same tensors, and none was written to."""
        then = [] if other is None else other.tensors
        return len(self.tensors) == len(then) and all(
            one is two and now == before for (one, now), (two, before) in zip(self.tensors, then, strict=True)
        )


_Entries = dict[LeftKey, _Entry]


class _Call(NamedTuple):
    """The first call of a stage.

    Attributes:
        before: what it found.
        written: the ids of the tensors that it wrote to in place.
        set_weights: the names of the trained parameters that it wrote to.
        shapes: of its inputs.
    """

    before: _Entries
    written: frozenset[int]
    set_weights: frozenset[str]
    shapes: list[torch.Size]


class KeptState:
    """Finds the state of a model's forward.

    State is what a call changes, and what the next one reads before it has set it again, and changes to other values
    once more. What is only stored (for a log), set before it is read, or made once (a cache of a length) is none; nor
    is a number, or an attribute's tensor, that is only added to. Running statistics of normalisation are not looked at.
    Of what runs compiled it is not seen what is read: tensors that change in both calls count.

    Args:
        model: this rank's part of it.
        moves_weights: whether weights are written by the library while it runs, as where they are gathered.

    Attributes:
        found: the state, in the order in which it was found.
    """

    def __init__(self, model: nn.Module, *, moves_weights: bool = False):
        self._model, self._moves_weights = model, moves_weights
        self._calls: dict[int, _Call | None] = {}
        self.found: list[KeptValue] = []

    @contextmanager
    def watching(self, stage: int, sizes: Collection[int], arguments: Any) -> Iterator[None]:
        """A context for a call of a stage; from the third on, nothing is watched.

        Args:
            stage: that is called.
            sizes: the numbers of samples of micro-batches.
            arguments: the call's arguments, a tree.
        """
        first = self._calls.get(stage, MISSING)
        if first is None:
            yield
            return
        shapes = [leaf.shape for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
        modules = walk.modules(self._model)
        before = _entries(self._model)
        # A compiler that the script has called would trace what watches.
        is_seen = not any(map(is_compiled_by_script, modules))
        if first is MISSING:
            uses = _Uses({id(one): one for entry in before.values() for one, _ in entry.tensors}, self._trained())
            with uses if is_seen else nullcontext():
                yield
            self._calls[stage] = _Call(before, frozenset(uses.written), frozenset(uses.weights), shapes)
            return
        candidates = {
            key: entry
            for key, entry in before.items()
            if not entry.has_same_tensors(first.before.get(key))
            or any(id(one) in first.written for one, _ in entry.tensors)
        }
        uses = _Uses({id(one): one for entry in candidates.values() for one, _ in entry.tensors}, self._trained())
        numbers: list[LeftKey] = []
        if shapes == first.shapes and not any(map(is_compiled, modules)):
            numbers = [key for key, entry in before.items() if not entry.has_same_number(first.before.get(key))]
        with self._counting(numbers) as counts, uses if is_seen else nullcontext():
            yield
        self._calls[stage] = None
        now = _entries(self._model)
        for key in numbers:
            if counts[key].is_state and key in now and not now[key].has_same_number(before[key]):
                self.found.append(self._kept(key))
        all_read = any(map(is_compiled, modules))
        for key, entry in candidates.items():
            if key in now and self._is_state(key, entry, now[key], uses, all_read):
                self.found.append(self._kept(key, entry, sizes))
        once = first.set_weights - uses.weights
        self.found += [KeptValue(name, is_shared=True, is_set_once=True) for name in sorted(once)]

    def _trained(self) -> dict[int, str]:
        named = () if self._moves_weights else walk.named_parameters(self._model)
        return {id(one): name for name, one in named if one.requires_grad}

    def _is_state(self, key: LeftKey, before: _Entry, now: _Entry, uses: "_Uses", all_read: bool) -> bool:
        is_saved = self._is_saved(key)
        if not (all_read and is_saved) and not any(uses.is_read(one, is_saved) for one, _ in before.tensors):
            return False
        # An average of weights that begins as their copy is the same until they have been updated. What
        # nn.Embedding(max_norm=...) writes is not seen, and depends on no earlier call.
        if self._is_parameter(key) and not all_read:
            return uses.is_set(before)
        return uses.is_updated(before) or not uses.are_equal(before, now)

    def _is_parameter(self, key: LeftKey) -> bool:
        return key[1] in parameters_of(walk.submodule(self._model, key[0]))

    def _is_saved(self, key: LeftKey) -> bool:
        module = walk.submodule(self._model, key[0])
        return key[1] in parameters_of(module) or (
            key[1] in buffers_of(module) and key[1] not in transient_buffers_of(module)
        )

    def _kept(self, key: LeftKey, entry: _Entry | None = None, sizes: Collection[int] = ()) -> KeptValue:
        shape = () if entry is None or self._is_parameter(key) else self._shape_by_sample(key, entry, sizes)
        return KeptValue(qualified(*key), self._is_saved(key), shape)

    def _shape_by_sample(self, key: LeftKey, entry: _Entry, sizes: Collection[int]) -> tuple[int, ...]:
        """The shape of a tensor with a dimension as long as a micro-batch; empty if a weight's is, too."""
        module = walk.submodule(self._model, key[0])
        own = {id(one) for one, _ in entry.tensors}
        others = [one for one in (*walk.parameters(module), *walk.buffers(module)) if id(one) not in own]
        known = {1}.union(*(one.shape for one in others))
        for tensor, _ in entry.tensors:
            if any(size in sizes and size not in known for size in tensor.shape):
                return tuple(tensor.shape)
        return ()

    @contextmanager
    def _counting(self, keys: Iterable[LeftKey]) -> Iterator[dict[LeftKey, "_Count"]]:
        """Inside, reads and writes of attributes are counted."""
        counts = {key: _Count() for key in keys}
        parts = {(id(walk.submodule(self._model, path)), name): counts[path, name] for path, name in counts}

        def tell(module: nn.Module, name: str, is_write: bool) -> None:
            if (count := parts.get((id(module), name))) is not None:
                count.add(is_write)

        watched = {(type(walk.submodule(self._model, path)), name) for path, name in counts}
        try:
            for kind, name in watched:
                WatchedAttribute.put(kind, name).watchers.append(tell)
            yield counts
        finally:
            for kind, name in watched:
                WatchedAttribute.drop(kind, name, tell)


class _Count:
    """How often a number was read and set in a call."""

    def __init__(self) -> None:
        self._reads = self._writes = 0
        self._is_read_first = False

    def add(self, is_write: bool) -> None:
        self._is_read_first |= not is_write and not self._writes
        self._writes += is_write
        self._reads += not is_write

    @property
    def is_state(self) -> bool:
        """Whether it was read before it was set, and not only to be counted up."""
        return self._is_read_first and self._reads > self._writes > 0


class _Origin(NamedTuple):
    """The tensor that another one has the values of, or that it was added to.

    Attributes:
        root: its id.
        is_whole: whether the other is all of it, on its memory.
        on_memory: whether the other lies on its memory.
    """

    root: int
    is_whole: bool = True
    on_memory: bool = True


class _Uses(WatchingMode):
    """Watches what becomes of tensors: reads, and writes in place.

    Args:
        roots: the tensors, by id.
        weights: names of trained parameters, by id: of these, writes only.

    Attributes:
        written: the ids of those that were written to.
        weights: the names of those that were written to.
    """

    def __init__(self, roots: Mapping[int, Tensor], weights: Mapping[int, str]):
        super().__init__()
        self._roots, self._names = roots, weights
        self._origins = {root: _Origin(root) for root in (*roots, *weights)}
        self._kept: list[Any] = []  # so that no id is used twice
        self._values: dict[int, Tensor] = {}
        self._read: set[int] = set()
        self._added: set[int] = set()
        self._updated: set[int] = set()  # in place, of their old values
        self._set: set[int] = set()
        self.written: set[int] = set()
        self.weights: set[str] = set()

    def made(self, result: Any) -> None:
        """Compiled code is not watched."""

    def is_read(self, tensor: Tensor, is_saved: bool) -> bool:
        """Whether its old values were read; those of a mean that is saved also if they are only added to."""
        return id(tensor) in self._read or (is_saved and id(tensor) in self._added and tensor.is_floating_point())

    def is_updated(self, before: _Entry) -> bool:
        """Whether a tensor was computed in place, of its old values."""
        return any(id(one) in self._updated for one, _ in before.tensors)

    def is_set(self, before: _Entry) -> bool:
        """Whether a tensor was written to, in any way but to be clamped."""
        return any(id(one) in self._set for one, _ in before.tensors)

    def are_equal(self, before: _Entry, now: _Entry) -> bool:
        """Whether the values are the same after the call."""
        if len(before.tensors) != len(now.tensors):
            return False
        return all(
            self._is_equal(one, version, two, later)
            for (one, version), (two, later) in zip(before.tensors, now.tensors, strict=True)
        )

    def _is_equal(self, one: Tensor, version: int | None, two: Tensor, later: int | None) -> bool:
        if one is two and version == later and id(one) not in self.written:
            return True
        then = self._values.get(id(one), one)
        if then is two or one.shape != two.shape or one.dtype != two.dtype or one.device != two.device:
            return False
        if any(has_no_data(tensor) or tensor.layout is not torch.strided for tensor in (then, two)):
            return False
        return torch.equal(then, two)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA_FUNCTIONS:
            return func(*args, **kwargs)
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(id(leaf) in self._origins for leaf in leaves):
            return func(*args, **kwargs)
        name, origins = _name_of(func), [self._origins.get(id(leaf)) for leaf in leaves]
        used = [origin for origin in origins if origin is not None and origin.root not in self._names]
        if name in _ASIDE and len(used) < 2:
            return func(*args, **kwargs)
        is_in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        for target in pytree.tree_leaves((kwargs.get("out"), args[:1] if is_in_place else ())):
            self._note_write(target, name)
        result = func(*args, **kwargs)
        first = self._origins.get(id(args[0])) if args else None
        is_of_first = first is not None and used in ([], [first])
        if first is not None and is_of_first and name in _OVERWRITES | _PART_WRITES:
            if name in _OVERWRITES and first.is_whole:
                self._drop(first.root)
        elif first is not None and is_of_first and name in _SAME_MEMORY | _PARTS | _COPIES:
            self._derive(result, first, name)
        elif len(used) == 1 and name in _ADDS and not _needs_gradient(result):
            self._added.add(used[0].root)
            self._derive(result, used[0], "")
        else:
            self._read.update(origin.root for origin in used)
        return result

    def _note_write(self, target: Any, name: str) -> None:
        origin = self._origins.get(id(target))
        if origin is None or not origin.on_memory:
            return
        if origin.root in self._names:
            self.weights.add(self._names[origin.root])
            return
        self.written.add(origin.root)
        if name not in _CLAMPS:
            self._set.add(origin.root)
            if name not in _OVERWRITES | _PART_WRITES | _ADDS:
                self._updated.add(origin.root)
        root = self._roots[origin.root]
        if origin.root not in self._values and not has_no_data(root):
            self._values[origin.root] = root.detach().clone()

    def _derive(self, result: Any, origin: _Origin, name: str) -> None:
        """Note of which tensor a result has the values."""
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and id(leaf) not in self._origins:
                is_whole = origin.is_whole and name in _SAME_MEMORY
                self._origins[id(leaf)] = _Origin(
                    origin.root, is_whole, origin.on_memory and name in _SAME_MEMORY | _PARTS
                )
                self._kept.append(leaf)

    def _drop(self, root: int) -> None:
        """What was overwritten is not read any more."""
        for key in [key for key, origin in self._origins.items() if origin.root == root and origin.on_memory]:
            del self._origins[key]


def _name_of(func: Any) -> str:
    """Of a function; of the property whose getter or setter it is."""
    name = getattr(func, "__name__", "")
    if name not in ("__get__", "__set__"):
        return str(name)
    return getattr(func.__self__, "__name__", name) + ("=" if name == "__set__" else "")


def _needs_gradient(result: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(result))


def _entries(model: nn.Module) -> _Entries:
    """What a forward may keep: buffers, frozen parameters, and the attributes of modules that are not torch's."""
    found: _Entries = {}
    known: dict[int, list[Tensor]] = {}  # a model's configuration is an attribute of most of its modules
    for path, module in walk.named_modules(model):
        if isinstance(module, NormWithStatistics):
            continue
        held: dict[str, Any] = {
            name: one for name, one in parameters_of(module).items() if one is not None and not one.requires_grad
        }
        held |= buffers_of(module)
        if not type(module).__module__.startswith("torch."):
            held |= own_attributes(module)
        for name, value in held.items():
            entry = _Entry.of(value, known)
            if entry.tensors or isinstance(value, _PLAIN):
                found[path, name] = entry
    return found


def _tensors_in(value: Any, num_levels: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif num_levels and not isinstance(value, _PLAIN):
        below: list[Any] = list(value) if isinstance(value, tuple) else []
        for holder in holders(value):
            contents = holder.read(holder.thing)
            below += contents.values() if isinstance(contents, dict) else contents
        for one in below:
            yield from _tensors_in(one, num_levels - 1)
