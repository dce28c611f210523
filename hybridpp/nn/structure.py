"""Values described so that descriptions are equal only where nothing but identity tells the values apart."""

import decimal
import functools
import sys
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from enum import Enum
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
    NoneType,
    SimpleNamespace,
)
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridpp.code_owner import is_own_module
from hybridpp.nn.contents import attributes_of, is_container, is_same, items_of, put_attributes, put_items
from hybridpp.nn.snapshot import MISSING, holders, put_entry
from hybridpp.nn.torch_private import WrappedLoadHook, storage_id
from hybridpp.nn.walk import ScriptListing

_PLAIN = frozenset((NoneType, bool, int, str, bytes, torch.device))
_SEQUENCES = frozenset((tuple, list, torch.Size))
# What a module has of its own; hooks are in dicts by numbers that no two hooks of a process share.
_OF_ALL_MODULES = frozenset(vars(nn.Module()))
# Of one description, and of one tensor. A hook may refer to a data set; what lies beyond equals itself only.
_MAX_OBJECTS = 100_000
_MAX_ELEMENTS = 2**20


class Itself:
    """A description of an object that only the very same object has. It keeps the object, so that its id stays its
    own."""

    def __init__(self, thing: Any):
        self._thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and other._thing is self._thing

    def __hash__(self) -> int:
        return id(self._thing)


class Structure:
    """Describes values by their classes and all that they hold; also which of those are one object.

    Two values with equal descriptions do the same wherever they are used, if only they are not compared by identity.
    Functions are equal that have one code, and equal defaults and closures. Tensors are equal with equal values.
    Objects whose state cannot be seen, and those that hide some of it when they are copied, are equal to themselves
    only. Of this library's objects only the class counts.

    Args:
        leave_out: entries of modules that are not described: the dict's ``id``, and the key.

    Attributes:
        changeable: what was described of lists, dicts and objects, in order. Where descriptions are equal, these
            correspond one to one.
    """

    def __init__(self, leave_out: Iterable[tuple[int, str]] = ()):
        self._leave_out = frozenset(leave_out)
        self._numbers: dict[int, int] = {}
        self._memory: dict[int, int] = {}
        # Ids of temporary objects would be given again.
        self._alive: list[Any] = []
        self._classes: set[type] = set()
        self._namespaces: dict[int, dict[str, Any]] = {}
        self._has_others = False
        self.changeable: list[Any] = []

    @property
    def is_lasting(self) -> bool:
        """Whether what was described by identity stays for as long as the process: code, and classes of modules.

        If not, the descriptions equal no description of values that are made later, and keep objects alive.
        """
        return (
            not self._has_others
            and all(map(_is_lasting, self._classes))
            and all(map(_is_of_module, self._namespaces.values()))
        )

    def _itself(self, value: Any) -> Itself:
        self._has_others = True
        return Itself(value)

    def of(self, value: Any) -> Hashable:
        """The description of a value. What was described before, as a part of another value, is referred to."""
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if kind in (float, complex):
            return kind, repr(value)  # 0.0 equals -0.0, and nan does not equal itself
        number = self._numbers.get(id(value))
        if number is not None:
            return "seen", number
        if len(self._numbers) == _MAX_OBJECTS:
            return self._itself(value)
        self._numbers[id(value)] = len(self._numbers)
        self._alive.append(value)
        if kind in _SEQUENCES:
            if kind is list:
                self.changeable.append(value)
            return kind, tuple(map(self.of, value))
        if kind is dict:
            self.changeable.append(value)
            return kind, self._items(value)
        if _is_library(kind):
            return (kind,)
        if isinstance(value, nn.Module):
            self._classes.add(kind)
            return kind, self._module(value)
        if isinstance(value, Tensor):
            return self._tensor(value)
        describe = _KINDS.get(kind)
        if describe is None:
            return self._object(value)
        if kind in _CHANGEABLE:
            self.changeable.append(value)
        return kind, describe(self, value)

    def _items(self, held: Mapping[Any, Any]) -> Hashable:
        return tuple((self.of(key), self.of(value)) for key, value in held.items())

    def _module(self, module: nn.Module) -> Hashable:
        """What a module holds, in the order of names: what a boost put there was not put there in order."""
        attributes = vars(module)
        hooks: dict[int, int] = {}
        found = []
        for name in sorted(attributes):
            value = attributes[name]
            is_of_all = name in _OF_ALL_MODULES and isinstance(value, dict)
            if (is_of_all and not value) or (id(attributes), name) in self._leave_out:  # most are empty
                continue
            if isinstance(value, ScriptListing):  # no script's, and only where other ranks have something
                continue
            if not is_of_all:
                kind = type(value)
                found.append((name, (kind, value) if kind in _PLAIN else self.of(value)))  # most are plain
            elif held := self._of_all_modules(value, hooks):
                found.append((name, held))
        return tuple(found)

    def _of_all_modules(self, held: Mapping[Any, Any], hooks: dict[int, int]) -> tuple[Hashable, ...]:
        """A dict of children, parameters, buffers or hooks."""
        return tuple(
            (hooks.setdefault(key, len(hooks)) if isinstance(key, int) else key, self.of(value))
            for key, value in held.items()
            if (id(held), key) not in self._leave_out
        )

    def _tensor(self, tensor: Tensor) -> Hashable:
        is_dense = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_quantized
        if not is_dense or tensor.numel() > _MAX_ELEMENTS:
            return self._itself(tensor)
        memory = storage_id(tensor)
        where = self._memory.setdefault(memory, len(self._memory)), tensor.storage_offset()
        kind = type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
        return kind, tensor.is_leaf, tensor.is_inference(), where, self.of(vars(tensor)), values_of(tensor)

    def _function(self, function: FunctionType) -> Hashable:
        code = Itself(function.__code__), Itself(function.__globals__)
        self._namespaces[id(function.__globals__)] = function.__globals__
        parts = (function.__defaults__, function.__kwdefaults__, function.__closure__, vars(function))
        return code, tuple(map(self.of, parts)) if any(parts) else ()

    def _method(self, method: MethodType) -> Hashable:
        return self.of(method.__func__), self.of(method.__self__)

    def _builtin(self, function: BuiltinFunctionType) -> Hashable:
        owner = function.__self__
        if owner is None or isinstance(owner, ModuleType | type):
            return Itself(function)
        return function.__name__, self.of(owner)

    def _partial(self, partial: "functools.partial[Any]") -> Hashable:
        described = self.of(partial.func), tuple(map(self.of, partial.args))
        # A signature says what the rest does.
        others = {name: value for name, value in vars(partial).items() if name != "__signature__"}
        if partial.keywords or others:  # most have none
            return *described, self.of(partial.keywords), self.of(others)
        return described

    def _cell(self, cell: CellType) -> Hashable:
        contents = _cell_contents(cell)
        return "empty" if contents is MISSING else self.of(contents)

    def _set(self, held: Iterable[Any]) -> Hashable:
        # Of others the order is by identity, and so would be their numbers.
        return frozenset(map(self.of, held)) if all(type(part) in _PLAIN for part in held) else self._itself(held)

    def _attributes(self, holder: Any) -> Hashable:
        return self.of(vars(holder))

    def _load_hook(self, hook: WrappedLoadHook) -> Hashable:
        return hook.with_module, self.of(hook.hook)

    def _default_dict(self, held: "defaultdict[Any, Any]") -> Hashable:
        return self.of(held.default_factory), self._items(held)

    def _deque(self, held: "deque[Any]") -> Hashable:
        return held.maxlen, tuple(map(self.of, held))

    def _decimal(self, context: decimal.Context) -> Hashable:
        return repr(context)  # all that it holds; every context of Python's has one once a decimal was computed

    def _weak(self, held: "weakref.ref[Any]") -> Hashable:
        return self.of(held()), self.of(held.__callback__)

    def _object(self, value: Any) -> Hashable:
        kind = type(value)
        if isinstance(value, type):
            self._classes.add(value)
            return Itself(value)
        self._classes.add(kind)
        if isinstance(value, Enum | torch.dtype | ContextVar):
            return Itself(value)
        if not _shows_state(kind):
            return self._itself(value)
        try:
            made = value.__reduce_ex__(4)
        except Exception:  # it holds what only C code sees
            return self._itself(value)
        if isinstance(made, str):
            return self._itself(value)
        function, args, state, items, entries = (*made, None, None, None)[:5]
        self.changeable.append(value)
        held = [list(part) if part is not None else None for part in (items, entries)]
        return kind, Itself(function), self.of(args), self.of(state), self.of(held)


_CHANGEABLE = frozenset((set, OrderedDict, defaultdict, deque, SimpleNamespace, CellType))
_KINDS: dict[type, Callable[[Structure, Any], Hashable]] = {
    FunctionType: Structure._function,
    MethodType: Structure._method,
    BuiltinFunctionType: Structure._builtin,
    functools.partial: Structure._partial,
    CellType: Structure._cell,
    set: Structure._set,
    frozenset: Structure._set,
    OrderedDict: Structure._items,
    MappingProxyType: Structure._items,
    defaultdict: Structure._default_dict,
    deque: Structure._deque,
    weakref.ref: Structure._weak,
    decimal.Context: Structure._decimal,
    SimpleNamespace: Structure._attributes,
    WrappedLoadHook: Structure._load_hook,
}


class PlainChange(NamedTuple):
    """An entry of a dict, or an attribute, that was set to a plain value.

    Attributes:
        number: of the object, among the changeable ones of a :class:`Structure`.
        is_item: whether it is an entry of a dict.
        key: of the entry, or the attribute's name.
        value: the new one; ``MISSING``: it was removed.
    """

    number: int
    is_item: bool
    key: Any
    value: Any


class ObjectChanges:
    """What changes in objects that were described; modules and tensors are not looked at.

    Args:
        objects: the changeable ones of a :class:`Structure`, before the changes.
    """

    def __init__(self, objects: Sequence[Any]):
        self._before = [
            (number, holder, holder.read(thing)) for number, thing in enumerate(objects) for holder in holders(thing)
        ]
        self._cells = [(cell, _cell_contents(cell)) for cell in objects if isinstance(cell, CellType)]

    def plain(self) -> list[PlainChange] | None:
        """The changes since; None if they are not all of entries to plain values, which can be repeated elsewhere."""
        if any(_cell_contents(cell) is not before for cell, before in self._cells):
            return None
        found = []
        for number, holder, before in self._before:
            now = holder.read(holder.thing)
            if is_same(now, before):
                continue
            if not isinstance(now, dict) or not isinstance(before, dict):
                return None
            for key in before | now:
                value = now.get(key, MISSING)
                if value is before.get(key, MISSING):
                    continue
                if type(key) not in _PLAIN or (value is not MISSING and type(value) not in (*_PLAIN, float)):
                    return None
                found.append(PlainChange(number, is_container(holder.thing) and holder.read is items_of, key, value))
        return found


def repeat_changes(objects: Sequence[Any], changes: Iterable[PlainChange]) -> None:
    """Make changes in the corresponding objects of an equal :class:`Structure`; those that are there stay."""
    for number, is_item, key, value in changes:
        thing = objects[number]
        contents: dict[Any, Any] = dict(items_of(thing)) if is_item else attributes_of(thing)
        if contents.get(key, MISSING) is not value:
            put_entry(contents, key, value)
            (put_items if is_item else put_attributes)(thing, contents)


def _cell_contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def values_of(tensor: Tensor) -> bytes | None:
    """The values of a dense tensor, in the order of its elements; None if it has none."""
    if tensor.is_meta:
        return None
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return bytes(dense.reshape(-1).view(torch.uint8).numpy().tobytes())


def _is_lasting(kind: type) -> bool:
    """Whether a class is one of a module that is imported."""
    name = kind.__qualname__.partition(".")[0]
    return "<locals>" not in kind.__qualname__ and hasattr(sys.modules.get(kind.__module__), name)


def _is_of_module(namespace: dict[str, Any]) -> bool:
    """Whether global names are those of a module that is imported, and not of a text that was run."""
    module = sys.modules.get(namespace.get("__name__", ""))
    return module is not None and vars(module) is namespace


def _is_library(kind: type) -> bool:
    return is_own_module(kind.__module__)


def _shows_state(kind: type) -> bool:
    """Whether a copy of an object of this class holds all that the object does."""
    return all(
        getattr(kind, name, None) is getattr(object, name, None)
        for name in ("__reduce_ex__", "__reduce__", "__getstate__")
    )
