"""When the units of a model run: in the forward, and in the backward pass."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
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
    """What a unit returned: of a tensor its size, and ``ids`` of those."""

    spec: Any
    leaves: tuple[Any, ...]
    ids: tuple[int, ...]

    @classmethod
    def of(cls, leaves: Sequence[Any], spec: Any) -> "_Output":
        sizes = tuple(_Size.of(leaf) if _is_shown(leaf) else leaf for leaf in leaves)
        return cls(spec, sizes, tuple(map(id, leaves)))


def _passed_on(output: _Output | None, given: Sequence[Any]) -> Any:
    """What a unit is given of what the one before returned, as that returned it; None: it is not all of it.

    If that is one tensor, it may have been changed on the way: it is the first that has a gradient.
    """
    if output is None or not all(isinstance(leaf, _Size) or not isinstance(leaf, Tensor) for leaf in output.leaves):
        return None
    hidden = [leaf for leaf in given if isinstance(leaf, Tensor) and leaf.requires_grad]
    numbers = [number for number, leaf in enumerate(output.leaves) if isinstance(leaf, _Size)]
    known = {id(leaf): leaf for leaf in hidden}
    found = hidden[:1] if len(numbers) == 1 else [known.get(output.ids[number]) for number in numbers]
    leaves = list(output.leaves)
    for number, leaf in zip(numbers, found, strict=False):
        if leaf is None or _Size.of(leaf) != leaves[number]:
            return None
        leaves[number] = leaf
    return pytree.tree_unflatten(leaves, output.spec) if len(found) == len(numbers) > 0 else None


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
        # By call: the number of the result of which its gradient is.
        self._noted: dict[int, int] = {}
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
        self._noted.clear()
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
            self._output = _Output.of(leaves, spec)
        results = tuple(self._look(_held(leaf)) if _is_shown(leaf) else None for leaf in leaves)
        self.calls[index] = self.calls[index]._replace(end=self._now(), results=results)
        for number, leaf in enumerate(one for one in leaves if _is_shown(one) and one.requires_grad):
            _held(leaf).register_hook(partial(self._note_gradient, index, number))
        return output

    def _note_gradient(self, index: int, number: int, _: Tensor) -> None:
        # That of the first of its results that has any. A tensor that is returned by two units has two hooks.
        if index < len(self.calls) and number < self._noted.get(index, number + 1):
            self._noted[index] = number
            self.calls[index] = self.calls[index]._replace(gradient=self._now())
