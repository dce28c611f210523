"""Leave what a criterion keeps between its calls as it is, while it is called to look at its loss."""

import copy
import functools
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hybridpp.nn.torch_private import buffers_of

_MOST_LEVELS = 4
_COPIED = (list, dict, set, deque)
# What every module has; buffers are treated apart.
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}


@contextmanager
def unchanged(criterion: Any) -> Iterator[None]:
    """A context in which a criterion computes with copies of its state, which are dropped at the end.

    The state is that of modules and other objects which are the criterion, or which its method, its partial, its
    closure or the globals that it reads hold: buffers, other attributes, and what is in lists, dicts and sets of these.
    The tensors themselves are not written to, so that a backward pass may still need them.
    """
    with ExitStack() as stack:
        for holder in _holders(criterion, _MOST_LEVELS, set()):
            if isinstance(holder, nn.Module):
                stack.enter_context(_with_copies(vars(holder), _OF_MODULES))
                stack.enter_context(_with_copies(buffers_of(holder)))
            else:
                stack.enter_context(_with_copies(vars(holder)))
        yield


@contextmanager
def _with_copies(held: dict[str, Any], left_out: frozenset[str] = frozenset()) -> Iterator[None]:
    before = {name: value for name, value in held.items() if name not in left_out}
    held.update({name: _copied(value) for name, value in before.items()})
    try:
        yield
    finally:
        for name in held.keys() - before.keys() - left_out:
            del held[name]
        held.update(before)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not value.requires_grad:
        with torch.no_grad():
            return value.clone()
    return copy.copy(value) if type(value) in _COPIED else value


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
        inner = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        inner += [value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__]
        inner = [one for one in inner if callable(one)]
    elif isinstance(value, nn.Module):
        for module in value.modules():
            seen.add(id(module))
            yield module
        return
    elif callable(value) and hasattr(value, "__dict__"):
        yield value
        inner = [one for one in vars(value).values() if isinstance(one, nn.Module)]
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
