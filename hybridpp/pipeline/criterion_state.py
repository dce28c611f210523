"""Leave what a criterion keeps between its calls as it is, while it is called to look at its loss."""

import copy
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hybridpp.code_owner import is_library_module
from hybridpp.nn.torch_private import buffers_of

_MOST_LEVELS = 4
_COPIED = (list, dict, set, deque)
# Larger tensors of a closure or of globals are tables that a criterion reads.
_MOST_ELEMENTS = 2**26
# What every module has; buffers are treated apart.
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}


def may_keep(criterion: Any) -> bool:
    """Whether a criterion has state, as far as :func:`unchanged` sees it; a generator that it asks cannot be copied."""
    return any(
        not isinstance(holder, FunctionType)
        or any(_is_state(holder.__globals__.get(name, ...)) for name in holder.__code__.co_names)
        or any(_is_state(cell.cell_contents) for cell in holder.__closure__ or () if _is_filled(cell))
        for holder in _holders(criterion, _MOST_LEVELS, set())
    )


def numbers_of(*holders: Any) -> list[int | float]:
    """The plain numbers that criteria (or modules) hold, in the places that :func:`unchanged` sees."""
    found: list[int | float] = []
    seen = set[int]()
    for one in holders:
        for holder in _holders(one, _MOST_LEVELS, seen):
            held: list[Any] = []
            if isinstance(holder, FunctionType):
                held += [holder.__globals__.get(name) for name in holder.__code__.co_names]
                held += [cell.cell_contents for cell in holder.__closure__ or () if _is_filled(cell)]
            else:
                held += vars(holder).values()
            found += [value for value in held if isinstance(value, int | float) and not isinstance(value, bool)]
    return found


@contextmanager
def unchanged(criterion: Any) -> Iterator[Callable[[], list[str]]]:
    """A context in which a criterion computes with copies of its state, which are dropped at the end.

    The state is that of modules and other objects which are the criterion, or which its method, its partial, its
    closure or the globals that it reads hold: buffers, other attributes, and what is in lists, dicts and sets of these;
    and the numbers, tensors and containers in the closure and in those globals.
    The tensors themselves are not written to, so that a backward pass may still need them.

    Yields:
        a function that names what is another than at the beginning.
    """
    with ExitStack() as stack:
        changes: list[Callable[[], list[str]]] = []
        for holder in _holders(criterion, _MOST_LEVELS, set()):
            if isinstance(holder, FunctionType):
                held = holder.__globals__
                names = [name for name in holder.__code__.co_names if name in held and _is_state(held[name])]
                changes.append(stack.enter_context(_with_copies("", held, names)))
                cells = zip(holder.__code__.co_freevars, holder.__closure__ or (), strict=True)
                changes += [stack.enter_context(_with_copy_in(*one)) for one in cells if _is_filled(one[1])]
                continue
            prefix, left_out = f"{type(holder).__name__}.", frozenset[str]()
            if isinstance(holder, nn.Module):
                left_out = _OF_MODULES
                changes.append(stack.enter_context(_with_copies(prefix, buffers_of(holder))))
            changes.append(stack.enter_context(_with_copies(prefix, vars(holder), left_out=left_out)))
        yield lambda: [name for changed in changes for name in changed()]


@contextmanager
def _with_copies(
    prefix: str, held: dict[str, Any], names: Iterable[str] | None = None, left_out: frozenset[str] = frozenset()
) -> Iterator[Callable[[], list[str]]]:
    """Copies of some entries; without ``names``, of all but some, and entries that come are dropped."""
    before = {name: held[name] for name in (held if names is None else names) if name not in left_out}
    held.update({name: _copied(value) for name, value in before.items()})

    def new() -> set[str]:
        return held.keys() - before.keys() - left_out if names is None else set()

    try:
        yield lambda: [
            prefix + name
            for name in [*before, *sorted(new())]
            if not (name in before and name in held and _is_equal(held[name], before[name]))
        ]
    finally:
        for name in new():
            del held[name]
        held.update(before)


@contextmanager
def _with_copy_in(name: str, cell: CellType) -> Iterator[Callable[[], list[str]]]:
    before = cell.cell_contents
    if not _is_state(before):
        yield list
        return
    cell.cell_contents = _copied(before)
    try:
        yield lambda: [] if _is_filled(cell) and _is_equal(cell.cell_contents, before) else [name]
    finally:
        cell.cell_contents = before


def _is_state(value: Any) -> bool:
    """Whether a function may keep something from call to call in such a variable."""
    if isinstance(value, Tensor):
        return value.numel() <= _MOST_ELEMENTS
    return value is None or isinstance(value, (int, float, complex, str, tuple, *_COPIED))


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not value.requires_grad:
        with torch.no_grad():
            return value.clone()
    return copy.copy(value) if type(value) in _COPIED else value


def _is_equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_equal(value, other[name]) for name, value in one.items())
    try:
        return bool(one == other)
    except Exception:  # a comparison of the script's own
        return False


def _holders(value: Any, levels: int, seen: set[int]) -> Iterator[Any]:
    """The objects with state, each once."""
    if levels < 0 or id(value) in seen or isinstance(value, type | ModuleType | Tensor):
        return
    seen.add(id(value))
    if isinstance(value, functools.partial):
        inner = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, MethodType):
        inner = [value.__self__, value.__func__]
    elif isinstance(value, FunctionType):
        if is_library_module(value.__module__):
            return
        yield value
        inner = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        inner += [value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__]
        inner = [one for one in inner if callable(one)]
    elif isinstance(value, nn.Module):
        modules = list(value.modules())
        seen.update(map(id, modules))
        yield from modules
        inner = [type(module).forward for module in modules]
    elif callable(value) and hasattr(value, "__dict__"):
        yield value
        inner = [one for one in vars(value).values() if isinstance(one, nn.Module)]
        inner.append(type(value).__call__)
    else:
        return
    for one in inner:
        yield from _holders(one, levels - 1, seen)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
