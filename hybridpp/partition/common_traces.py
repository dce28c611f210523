"""Traces that in-process ranks have in common: what a trace depends on, and what it leaves in objects."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextvars import copy_context
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from hybridpp.cluster import CommonResults
from hybridpp.nn import walk
from hybridpp.nn.structure import Itself, ObjectChanges, PlainChange, Structure, repeat_changes, values_of
from hybridpp.nn.torch_private import GLOBAL_FORWARD_HOOKS, GLOBAL_FORWARD_PRE_HOOKS, buffers_of, parameters_of
from hybridpp.partition.calls import CallArguments, Same, TensorSpec, Trace
from hybridpp.partition.compiled import compiled_parts
from hybridpp.partition.fakes import Fakes
from hybridpp.partition.trace_cache import TraceCache

_PLAIN = (bool, int, float, str)


class LearningLayer(Protocol):
    """An adapter layer that learns from complete forwards, which a stage alone does not run."""

    def learned(self) -> Any:
        """What it has learned; it refers to no object of a rank."""

    def learn(self, learned: Any) -> None:
        """Learn the same from a forward of another rank."""


class CommonTrace(NamedTuple):
    """A trace that another rank may be given.

    Attributes:
        trace: of the forward.
        learned: by adapter layers.
        changes: that the forward made in objects; None: they cannot be made in those of another rank.
        results: of units, that it was made with.
    """

    trace: Trace
    learned: list[Any]
    changes: list[PlainChange] | None
    results: Mapping[Any, Any]

    def is_of_any_rank(self) -> bool:
        """Whether the trace refers to no object of a model and to no state that units keep."""
        if self.changes is None or any(self.trace.resets):
            return False
        if any(call.assigned or call.appended for call in self.trace.calls):
            return False
        leaves = (leaf for call in self.trace.calls for leaf in call.leaves)
        return all(leaf is None or isinstance(leaf, (TensorSpec, Same, *_PLAIN)) for leaf in leaves)


class TracedForward:
    """One forward, of which another rank may have made the trace.

    Its key has everything that the forward can see: all attributes and hooks of all modules, with what they refer to,
    the metadata of the parameters, the values of the buffers, the arguments, and the context. This library's objects on
    the model count by their class: keys are compared between ranks that boosted in the same way.

    Args:
        model: the complete model, which may be pruned.
        fakes: of its tensors.
        arguments: of its forward.
        options: of the trace.
        cache: of results of the model's units.

    Attributes:
        key: where two are equal, so are the traces; None: that cannot be told.
        is_of_run: whether the key refers to objects that no other run in this process has.
    """

    def __init__(self, model: nn.Module, fakes: Fakes, arguments: CallArguments, options: Hashable, cache: TraceCache):
        structure = Structure((id(held), key) for module, key, _ in fakes.slots for held in _dicts(module))
        self._cache = cache
        self._objects = structure.changeable
        self.key: Hashable | None = None
        self.is_of_run = True
        if compiled_parts(model):
            return  # an object of this library hides the forward
        try:
            described = structure.of([model, arguments, dict(copy_context())])
        except RecursionError:
            return
        buffers = tuple(map(values_of, fakes.originals.values()))
        self.key = options, described, _metadata(model, fakes), buffers, surroundings()
        self.is_of_run = not structure.is_lasting or has_global_hooks()

    def traced(self, make: Callable[[], Trace], layers: Sequence[LearningLayer]) -> CommonTrace:
        """The trace that ``make`` makes of this forward, and what else that does."""
        changes = ObjectChanges(self._objects)
        trace = make()
        return CommonTrace(trace, [layer.learned() for layer in layers], changes.plain(), self._cache.results)

    def take(self, found: CommonTrace, layers: Sequence[LearningLayer]) -> None:
        """Do what the trace of an equal forward did on another rank."""
        for layer, learned in zip(layers, found.learned, strict=True):
            layer.learn(learned)
        repeat_changes(self._objects, found.changes or ())
        self._cache.take(found.results)


class CommonTraces:
    """Traces of a model that in-process ranks hold in equal copies: the first rank that needs one makes it.

    Args:
        results: of this rank and the others.
        layers: those on the model that learn from traces.
    """

    def __init__(self, results: CommonResults, layers: Sequence[LearningLayer] = ()):
        self._results = results
        self._layers = layers

    def get(self, forward: TracedForward, make: Callable[[], Trace]) -> Trace:
        """The trace of a forward; ``make`` makes it, unless another rank has made that of an equal one."""
        if forward.key is None:
            return make()
        own: list[CommonTrace] = []

        def traced() -> CommonTrace:
            own.append(forward.traced(make, self._layers))
            return own[0]

        # What layers have learned before may be another in another run.
        key = forward.key, tuple(layer.learned() for layer in self._layers)
        found = self._results.get(key, traced, CommonTrace.is_of_any_rank, is_of_run=forward.is_of_run)
        if not own:
            forward.take(found, self._layers)
        return found.trace


def _metadata(model: nn.Module, fakes: Fakes) -> Hashable:
    """Of the parameters and buffers, and which of them are one."""
    named = {module: name for name, module in walk.named_modules(model)}
    numbers: dict[int, int] = {}
    return tuple(
        (named[module], key, numbers.setdefault(number, len(numbers)), fakes.specs[number])
        for module, key, number in fakes.slots
    )


def has_global_hooks() -> bool:
    """Whether there are hooks on the forwards of all modules."""
    return bool(GLOBAL_FORWARD_PRE_HOOKS or GLOBAL_FORWARD_HOOKS)


def surroundings() -> Hashable:
    """What else the operations of a forward depend on."""
    hooks = (*GLOBAL_FORWARD_PRE_HOOKS.items(), None, *GLOBAL_FORWARD_HOOKS.items())
    autocast = [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")]
    return torch.get_default_dtype(), *autocast, tuple(hook and (hook[0], Itself(hook[1])) for hook in hooks)


def _dicts(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """Those that may hold a tensor of a module: one that was pruned is a plain attribute."""
    return parameters_of(module), buffers_of(module), vars(module)
