"""When the units of a model run: in the forward, and in the backward pass."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridpp.module_adapter import AdapterLayer, Forward, ModuleAdapter
from hybridpp.nn.deferred_tensor import MadeWhenRead
from hybridpp.nn.torch_private import pytree

_PLAIN = (Tensor, nn.Parameter)


def _is_shown(leaf: Any) -> bool:
    """Whether what a tensor holds can be seen: not of other subclasses, which may do something when they are read."""
    return type(leaf) in _PLAIN or isinstance(leaf, MadeWhenRead)


def _held(leaf: Any) -> Any:
    """The tensor that has memory: of one that is gathered when it is read, the shard."""
    return leaf.held() if isinstance(leaf, MadeWhenRead) else leaf


class UnitMarks(NamedTuple):
    """Moments of one forward and backward pass, as ``now()`` gives them.

    Attributes:
        name: of the unit.
        begin, end: of its call.
        gradient: when the gradient of its result is complete, so that its backward pass begins; None: there is none.
        arguments: what ``look`` found of the tensors among its arguments; in a complete run: numbers of allocations.
        results: the same of its results; None for a leaf that is no tensor.
    """

    name: str
    begin: Any
    end: Any
    gradient: Any = None
    arguments: tuple[Any, ...] = ()
    results: tuple[Any, ...] = ()

    def with_allocations(self, number_of: Callable[[Any], int | None]) -> "UnitMarks":
        """The same with the numbers of what ``look`` found."""
        return self._replace(
            arguments=tuple(map(number_of, self.arguments)), results=tuple(map(number_of, self.results))
        )


class CannotLeaveOutError(Exception):
    """A unit does not return what it was given, changed; or is given something else than the one that stands for it.

    Args:
        name: of the unit.
    """

    def __init__(self, name: str):
        super().__init__(name)
        self.name = name


class _Size(NamedTuple):
    """Of a tensor, so that it is not kept."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "_Size":
        return cls(tuple(tensor.shape), tensor.dtype)


class _Output(NamedTuple):
    """What a unit returned."""

    spec: Any
    leaves: tuple[Any, ...]


def _passed_on(output: _Output | None, leaves: Sequence[Any]) -> Any:
    """The first argument of a unit that has a gradient, as the output of the unit before; None: it is not like that."""
    hidden = next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad), None)
    sizes = [] if output is None else [leaf for leaf in output.leaves if isinstance(leaf, _Size | Tensor)]
    if output is None or hidden is None or sizes != [_Size.of(hidden)]:
        return None
    return pytree.tree_unflatten([hidden if isinstance(leaf, _Size) else leaf for leaf in output.leaves], output.spec)


def _signature(leaves: Sequence[Any], has_sizes_of_integers: bool) -> tuple[Any, ...]:
    """What decides how a unit runs, of what it is given: not the number of a block, nor an object that all share."""

    def part(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return _Size.of(leaf) if has_sizes_of_integers or leaf.is_floating_point() else leaf.dtype
        return leaf if isinstance(leaf, bool | float | str) else type(leaf)

    return tuple(map(part, leaves))


class UnitRecorder:
    """Records the calls of a model's units, in the forward only: a call that is repeated in the backward pass is not.

    Args:
        adapter: of the model.
        units: names of its units.
        now: the time, or the number of an event.
        look: called with each tensor among a unit's arguments and results.
        left_out: units that do not run: they return what they were given, as the unit before them returned it. Each has
            the distance to the earlier unit that stands for it.
        inner: names of blocks inside of units, which are recorded, too, and may be left out.

    Attributes:
        calls: of the latest forward since :meth:`clear`.
        is_recording: whether calls are recorded.
    """

    def __init__(
        self,
        adapter: ModuleAdapter,
        units: tuple[str, ...],
        now: Callable[[], Any],
        look: Callable[[Tensor], Any] = lambda tensor: None,
        left_out: Mapping[str, int] | None = None,
        inner: Collection[str] = (),
    ):
        self._inner = frozenset(inner)
        self._left_out = left_out or {}
        self._given: list[tuple[Any, ...]] = []
        self._output: _Output | None = None
        self.calls: list[UnitMarks] = []
        self.is_recording = False
        self._now, self._look = now, look
        self._depth = 0
        modules: dict[nn.Module, str] = {}
        for name in (*units, *inner):
            module = adapter.model.get_submodule(name)
            if module not in modules:
                modules[module] = name
                adapter.wrap(module, AdapterLayer.MODEL, self._run, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "UnitRecorder":
        return self

    def clear(self) -> None:
        """Forget all calls, and what they returned."""
        self.calls.clear()
        self._given.clear()
        self._output = None

    def _run(self, name: str, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        # Outside of its unit, an inner block is run again by recomputation.
        if not self.is_recording or self._depth != (name in self._inner):
            return forward(*args, **kwargs)
        given = pytree.tree_leaves((args, kwargs))
        found = tuple(self._look(_held(leaf)) for leaf in given if _is_shown(leaf))
        index = len(self.calls)
        self.calls.append(UnitMarks(name, self._now(), None, None, found))
        if self._left_out:
            self._given.append(_signature(given, name not in self._inner))
        if name in self._left_out:
            passed_on = _passed_on(self._output, given)
            if passed_on is None or self._given[index] != self._given[index - self._left_out[name]]:
                raise CannotLeaveOutError(name)
            self.calls[index] = self.calls[index]._replace(end=self._now())
            return passed_on
        self._depth += 1
        try:
            output = forward(*args, **kwargs)
        finally:
            self._depth -= 1
        leaves, spec = pytree.tree_flatten(output)
        if self._left_out:
            self._output = _Output(spec, tuple(_Size.of(leaf) if _is_shown(leaf) else leaf for leaf in leaves))
        results = tuple(self._look(_held(leaf)) if _is_shown(leaf) else None for leaf in leaves)
        self.calls[index] = self.calls[index]._replace(end=self._now(), results=results)
        leaf = next((_held(one) for one in leaves if _is_shown(one) and one.requires_grad), None)
        if leaf is not None:
            leaf.register_hook(lambda gradient: self._note_gradient(index))
        return output

    def _note_gradient(self, index: int) -> None:
        # Once: a tensor that is returned by two units has two hooks.
        if index < len(self.calls) and self.calls[index].gradient is None:
            self.calls[index] = self.calls[index]._replace(gradient=self._now())
