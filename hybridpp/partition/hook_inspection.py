"""What a hook's code shows: whether it only observes, and what it can reach."""

import dis
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, TypeAlias

from torch import Tensor, nn

from hybridpp.code_owner import is_own_module
from hybridpp.nn import walk
from hybridpp.nn.contents import attributes_of, has_attributes, is_container
from hybridpp.nn.snapshot import Snapshot

ModuleHook: TypeAlias = Callable[..., Any]

_STORES = frozenset(("STORE_ATTR", "DELETE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR"))
_EMPTY = CellType()
# Depth of the search for what a hook changes: up to a list of lists in an attribute of its object. A hook with a
# reference to its trainer could reach everything, which takes long to search, and which other threads may change.
_NUM_LEVELS = 5


def is_users(hook: ModuleHook) -> bool:
    """Whether a hook is the user's; this library's hooks support fakes."""
    return not is_own_module(getattr(_function_of(hook), "__module__", ""))


def only_observes(hook: ModuleHook) -> bool:
    """Whether a hook's code returns None, assigns nothing and calls no in-place operation."""
    code = getattr(_function_of(hook), "__code__", None)
    if code is None or any(name == "setattr" or _is_in_place(name) for name in names_in(code)):
        return False
    previous = None
    for step in dis.get_instructions(code):
        # Newer versions of Python have one instruction for both.
        returns = step if step.opname == "RETURN_CONST" else previous if step.opname == "RETURN_VALUE" else None
        if step.opname in _STORES or (step.opname == "RETURN_VALUE" and step.is_jump_target):
            return False
        if returns is not None and not (returns.opname in ("LOAD_CONST", "RETURN_CONST") and returns.argval is None):
            return False
        previous = step
    return True


def shared_with_model(hook: ModuleHook, model: nn.Module) -> list[Any]:
    """What a hook refers to by which values may enter the model's forward other than as the module's result.

    Modules of the model, attributes of them, and context variables (by which transformers collects hidden states); in
    the same order in every process.
    """
    modules = set(walk.modules(model))
    shared = {id(held) for module in modules for held in vars(module).values()}
    found: list[Any] = []
    for thing in Reachable([hook]).objects:
        if isinstance(thing, nn.Module) and thing in modules:
            found.append(thing)
        elif _keeps(thing):
            found += [held for held in (thing, *attributes_of(thing).values()) if isinstance(held, ContextVar)]
            found += [thing] if id(thing) in shared else []
    return found


def _keeps(thing: Any) -> bool:
    if isinstance(thing, ContextVar) or is_container(thing):
        return True
    return has_attributes(thing) and not isinstance(thing, type | ModuleType | nn.Module | Tensor)


class Reachable:
    """What Python functions refer to: closures, global variables, defaults, and the objects whose methods they are.

    Attributes:
        objects: everything reached except functions.
    """

    def __init__(self, functions: Iterable[Any]):
        self._cells: list[tuple[CellType, Any]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self.objects: list[Any] = []
        seen: dict[int, Any] = {}
        pending = list(functions)
        while pending:
            thing = pending.pop()
            if id(thing) in seen:
                continue
            seen[id(thing)] = thing
            if isinstance(thing, MethodType):
                pending += [thing.__self__, thing.__func__]
            elif isinstance(thing, partial):
                pending += [thing.func, *thing.args, *thing.keywords.values()]
            elif isinstance(thing, FunctionType):
                pending += self._held_by(thing)
            else:
                self.objects.append(thing)

    def _held_by(self, function: FunctionType) -> list[Any]:
        cells = [(cell, cell.cell_contents) for cell in function.__closure__ or () if cell != _EMPTY]
        names = [name for name in sorted(names_in(function.__code__)) if name in function.__globals__]
        self._cells += cells
        self._globals += [(function.__globals__, name, function.__globals__[name]) for name in names]
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        return [*(held for _, held in cells), *(function.__globals__[name] for name in names), *defaults]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore everything reached after the block."""
        # In one object, as lists and dicts among arguments themselves are left out.
        state = Snapshot.reachable_from(SimpleNamespace(objects=self.objects), _NUM_LEVELS)
        try:
            yield
        finally:
            for cell, held in self._cells:
                cell.cell_contents = held
            for variables, name, value in self._globals:
                variables[name] = value
            state.restore()


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def names_in(code: CodeType) -> set[str]:
    """Names of global variables and attributes in a function and in functions nested in it."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(names_in, inner))


def _function_of(hook: Any) -> Any:
    if isinstance(hook, partial):
        return _function_of(hook.func)
    if isinstance(hook, MethodType):
        return hook.__func__
    return hook if isinstance(hook, FunctionType) else vars(type(hook)).get("__call__", hook)
