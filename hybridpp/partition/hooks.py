"""Module hooks: observers are left out of traces, and on containers, which all stages run, they run once."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeAlias

from torch import nn

from hybridpp.errors import HybridppError
from hybridpp.nn import walk
from hybridpp.nn.contents import attributes_of, is_same, put_items
from hybridpp.nn.snapshot import Replacements
from hybridpp.nn.torch_private import (
    GLOBAL_FORWARD_HOOKS,
    GLOBAL_FORWARD_PRE_HOOKS,
    forward_hooks_of,
    forward_pre_hooks_of,
    takes_kwargs,
    version_of,
)
from hybridpp.partition.concrete_fallback import run_on_concrete_values
from hybridpp.partition.containers import tensors_in
from hybridpp.partition.hook_inspection import ModuleHook, Reachable, is_users, only_observes, shared_with_model
from hybridpp.partition.module_outputs import MODULE_INTERNALS

_GLOBAL: tuple[dict[int, ModuleHook], ...] = (GLOBAL_FORWARD_PRE_HOOKS, GLOBAL_FORWARD_HOOKS)
# Number of known hooks above which removed ones are dropped.
_MAX_KNOWN = 1024

HookEffects: TypeAlias = Mapping[int, bool]
"""Whether a hook that ran in a trace changed anything, by its index in :meth:`ModelHooks.registered`."""


class ModelHooks:
    """Classification of a model's hooks, and their treatment in a trace.

    A hook that only observes, judged by its code, is not run. Any other may be part of what its module computes (a norm
    of the weights, another format of the output), so it is run on fakes, or on concrete values if it reads values. Its
    changes of Python's objects are undone afterwards.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # By id; the hooks are kept alive, so that ids stay unique.
        self._shared: dict[int, tuple[ModuleHook, list[Any]]] = {}
        self._most_known = _MAX_KNOWN
        self._run: dict[int, ModuleHook] = {}
        self._changing: set[int] = set()

    def registered(self) -> list[ModuleHook]:
        """The hooks on the model's forwards now: the global ones, then those of each module."""
        return [hook for held in _hook_dicts(self._model) for hook in held.values()]

    def learn(self, hooks: Sequence[ModuleHook], effects: HookEffects) -> None:
        """Classify hooks by what they did in a trace.

        Args:
            hooks: those that were :meth:`registered` when the trace began.
            effects: as :meth:`disabled_for_trace` gave them, on this model or on an equal one.
        """
        for index, changed in effects.items():
            self._run[id(hooks[index])] = hooks[index]
            if changed:
                self._changing.add(id(hooks[index]))

    @contextmanager
    def disabled_for_trace(self) -> Iterator[HookEffects]:
        """Disable or replace the hooks inside, for a trace; yields what the hooks that run there do."""
        effects: dict[int, bool] = {}
        indices = {id(hook): index for index, hook in enumerate(self.registered())}

        def note(hook: ModuleHook, changed: bool) -> None:
            index = indices[id(hook)]
            effects[index] = changed or effects.get(index, False)

        dicts = [held for held in _hook_dicts(self._model) if any(map(self._is_replaced, held.values()))]
        reach = Reachable(hook for held in dicts for hook in held.values() if self._is_replaced(hook))
        # Other code registers and removes hooks in the same dicts meanwhile.
        replaced = Replacements()
        try:
            for held in dicts:
                for key, hook in list(held.items()):
                    if self._is_replaced(hook):
                        stand_in = partial(_left_out, hook) if only_observes(hook) else HookOnFakes(hook, note)
                        replaced.put(held, key, stand_in)
            with reach.restored():
                yield effects
        finally:
            replaced.restore(keep_newer=True)

    def is_observer(self, hook: ModuleHook) -> bool:
        """Whether a hook only observes, judged by its code or by its effects in a trace."""
        is_observer = only_observes(hook) or (id(hook) in self._run and id(hook) not in self._changing)
        return is_observer and not self.is_container_code(hook)

    def is_container_code(self, hook: ModuleHook) -> bool:
        """Whether values that a hook sees may enter the model's forward other than as the module's result.

        Such a hook is container code: it runs on every stage. But for hooks of modules inside of units, which run where
        the unit runs: what they leave is sent (see :meth:`reached_from`).
        """
        return bool(self._shared_by(hook))

    def _shared_by(self, hook: ModuleHook) -> list[Any]:
        if id(hook) not in self._shared:
            if len(self._shared) >= self._most_known:
                self._forget_gone()
                # A model of many modules may have more: each is looked for again when they have doubled.
                self._most_known = max(_MAX_KNOWN, 2 * len(self._shared))
            self._shared[id(hook)] = hook, shared_with_model(hook, self._model) if is_users(hook) else []
        return self._shared[id(hook)][1]

    def reached_from(self, unit: nn.Module) -> tuple[Any, ...]:
        """What hooks of modules inside of a unit may write to, and the model's forward may read, as it is now.

        Values of context variables, attributes of the model's modules, and the lists and dicts among the attributes of
        modules outside of the unit.
        """
        inside = list(walk.modules(unit))
        found: dict[int, Any] = {}
        for module in inside:
            if module is unit:
                continue  # its own hooks run around it
            for hook in (*forward_pre_hooks_of(module).values(), *forward_hooks_of(module).values()):
                found |= {id(thing): thing for thing in self._shared_by(hook)}
        reached: list[Any] = []
        for thing in found.values():
            if isinstance(thing, ContextVar):
                reached.append(thing.get(None))
            elif not isinstance(thing, nn.Module):
                reached.append(thing)
            elif thing not in inside:
                held = (value for name, value in vars(thing).items() if name not in MODULE_INTERNALS)
                reached += [value for value in held if isinstance(value, list | dict | deque)]
        return tuple(reached)

    def _forget_gone(self) -> None:
        """Drop entries of removed hooks: a script may register new ones in every step."""
        there = {id(hook) for held in _hook_dicts(self._model) for hook in held.values()}
        self._shared = {key: known for key, known in self._shared.items() if key in there}
        self._run = {key: hook for key, hook in self._run.items() if key in there}
        self._changing &= there

    def container_code_of(self, module: nn.Module) -> "ContainerCodeHooks | None":
        """The hooks of a unit that are container code, if it has any."""
        before = [key for key, hook in forward_pre_hooks_of(module).items() if self.is_container_code(hook)]
        after = [key for key, hook in forward_hooks_of(module).items() if self.is_container_code(hook)]
        return ContainerCodeHooks(module, before, after) if before or after else None

    def _is_replaced(self, hook: ModuleHook) -> bool:
        return is_users(hook) and not self.is_container_code(hook)


class ContainerCodeHooks:
    """Hooks of a module that are run around it instead of by it."""

    def __init__(self, module: nn.Module, before: list[int], after: list[int]):
        self._module = module
        self._before = before
        self._after = after

    def run(self, unit: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the pre-hooks, ``unit(args, kwargs)`` without these hooks, and the hooks; returns the result."""
        module = self._module
        held = forward_pre_hooks_of(module), forward_hooks_of(module)
        contents = tuple(dict(hooks) for hooks in held)
        for key in self._before:
            found = held[0][key]
            if takes_kwargs(module, key):
                args, kwargs = found(module, args, kwargs) or (args, kwargs)
            else:
                changed = found(module, args)
                args = args if changed is None else changed if isinstance(changed, tuple) else (changed,)
        try:
            for hooks, keys in zip(held, (self._before, self._after), strict=True):
                for key in keys:
                    del hooks[key]
            output = unit(args, kwargs)
        finally:
            for hooks, before in zip(held, contents, strict=True):
                put_items(hooks, before)
        for key in self._after:
            named = (kwargs,) if takes_kwargs(module, key) else ()
            changed = held[1][key](module, args, *named, output)
            output = output if changed is None else changed
        return output


class HookOnFakes:
    """A hook in a trace.

    Args:
        hook: the user's.
        note: called with whether the hook changed anything, at every call.

    Attributes:
        hook: the user's.
    """

    def __init__(self, hook: ModuleHook, note: Callable[[ModuleHook, bool], None]):
        self.hook = hook
        self._note = note

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        tensors = tensors_in(args)
        versions, attributes = [version_of(tensor) for tensor in tensors], attributes_of(module)
        try:
            result = self._run(module, *args)
        except HybridppError:
            raise
        except Exception:  # it may fail on placeholder values; real errors show in the run
            return None
        same = versions == [version_of(tensor) for tensor in tensors] and is_same(attributes_of(module), attributes)
        self._note(self.hook, result is not None or not same)
        return result

    def _run(self, module: nn.Module, *args: Any) -> Any:
        try:
            return self.hook(module, *args)
        except HybridppError:
            raise
        except Exception:  # it looks at values
            return run_on_concrete_values(module, (self.hook, (module, *args), {}), {})


@contextmanager
def run_once(
    containers: Iterable[nn.Module],
    is_observer: Callable[[ModuleHook], bool],
    begins: Callable[[], bool],
    ends: Callable[[], bool],
) -> Iterator[None]:
    """Inside, observers on containers run only on the stage where the container begins (pre-hooks) or ends (hooks).

    Args:
        containers: modules whose forward every stage runs.
        is_observer: whether a hook only observes; others are container code and run on every stage.
        begins: whether the next unit of the forward belongs to this stage.
        ends: whether the latest unit of the forward belongs to this stage.
    """
    held = [
        (hooks, here)
        for c in containers
        for hooks, here in ((forward_pre_hooks_of(c), begins), (forward_hooks_of(c), ends))
    ]
    replaced = Replacements()
    for hooks, here in held:
        for key, hook in list(hooks.items()):
            if is_observer(hook):
                replaced.put(hooks, key, _RunOnce(hook, here))
    try:
        yield
    finally:
        # Only hooks that are still registered: a hook may remove itself.
        replaced.restore(keep_newer=True)


class _RunOnce:
    def __init__(self, hook: ModuleHook, here: Callable[[], bool]):
        self.hook = hook
        self._here = here

    def __call__(self, *args: Any) -> Any:
        return self.hook(*args) if self._here() else None


def _hook_dicts(model: nn.Module) -> list[dict[int, ModuleHook]]:
    """The dicts of torch's forward hooks: the global ones, and those of each module."""
    return [
        *_GLOBAL,
        *(
            hooks
            for module in walk.modules(model)
            for hooks in (forward_pre_hooks_of(module), forward_hooks_of(module))
        ),
    ]


def _left_out(hook: ModuleHook, *args: Any) -> None:
    """Replaces a hook that does not run in a trace."""
