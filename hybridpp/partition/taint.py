"""Follow values through the container code between units: the unit outputs and parameters that a tensor depends on."""

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from hybridpp.errors import PartitionError
from hybridpp.nn.metadata_functions import METADATA_FUNCTIONS, writes_first_argument
from hybridpp.nn.torch_private import FakeTensor, storage_id, unwrapped
from hybridpp.partition.containers import tensors_in
from hybridpp.partition.derivatives import GRAD, stand_ins
from hybridpp.partition.known_masks import run_with_known_masks


class Value(NamedTuple):
    """A tensor that a unit call returned: the call's position in the forward, and the leaf of its output."""

    call: int
    leaf: int


Source: TypeAlias = Value | str
"""Source of a tensor: a unit's output, or a parameter by its name."""

_NOTHING: frozenset[Source] = frozenset()

_OF_VALUES = ("bool", "int", "float", "index", "complex", "contains", "array", "format")
# Functions that tell code the values of a tensor.
_READS = frozenset(
    {
        *(getattr(Tensor, f"__{name}__") for name in _OF_VALUES),
        *(getattr(Tensor, name) for name in ("item", "tolist", "numpy", "equal", "allclose", "is_nonzero")),
        *(torch.equal, torch.allclose, torch.is_nonzero),
    }
)


class SeenDerivative(NamedTuple):
    """A backward pass that code of the forward ran.

    Attributes:
        outputs: the sources of what was differentiated.
        inputs: the sources of each tensor with respect to which it was; empty: all leaves.
        unit: the unit whose code it is; empty: container code.
    """

    outputs: frozenset[Source]
    inputs: tuple[frozenset[Source], ...]
    unit: str


class TaintMode(TorchFunctionMode):
    """While active, every torch function passes the sources of its arguments on to its results.

    A fake tensor of unknown origin (created in a function that torch function modes do not see) counts as computed from
    every value so far: more is sent than necessary, but nothing is missing.

    Args:
        on_derivative: a method, called with each derivative that code of the forward computes, but not with those of a
            unit with respect to tensors of its own; returns whether it goes through calls of units. Then its results
            are made up: the fakes of a trace have no complete graph.

    Attributes:
        decisions: the sources of real values that container code has read, on which what follows may depend: what a
            unit has made of inputs alone (a mask) is real in a trace.
    """

    def __init__(self, on_derivative: Callable[[SeenDerivative], bool] | None = None) -> None:
        super().__init__()
        # Weak: its owner holds this, and the fakes of a trace should go with the last reference to it.
        self._on_derivative = None if on_derivative is None else WeakMethod(on_derivative)
        self._sources: dict[int, frozenset[Source]] = {}
        # Sources of in-place writes, by the memory that was written to: views of that memory see them too.
        self._written: dict[int, frozenset[Source]] = {}
        # Keeps every marked tensor alive, so that ids stay unique.
        self._alive: list[Tensor] = []
        self._everything: frozenset[Source] = _NOTHING
        self.decisions: frozenset[Source] = _NOTHING
        self._paused = False
        self._used: dict[int, frozenset[Source]] = {}
        self._watched: Container[int] = ()
        self._read: set[int] = set()
        # The unit that created each tensor; those that leave the unit in a known way are marked.
        self._made_in: Any = WeakIdKeyDictionary()
        self._unit = ""
        self._excused: set[str] = set()

    def mark(self, tensor: Tensor, sources: Iterable[Source]) -> None:
        """Set the sources of a tensor, replacing previous ones."""
        self._sources[id(tensor)] = frozenset(sources)
        self._everything |= {source for source in self._sources[id(tensor)] if isinstance(source, Value)}
        self._alive.append(tensor)

    def written(self, tensor: Tensor, sources: Iterable[Source]) -> None:
        """Record the sources that a tensor was overwritten with, completely or partly."""
        memory = _memory(tensor)
        self._written[memory] = self._written.get(memory, _NOTHING) | frozenset(sources)
        self._alive.append(tensor)

    def sources(self, tree: Any) -> frozenset[Source]:
        """The sources of all tensors in ``tree``."""
        found = _NOTHING
        for tensor in tensors_in(tree):
            known = self._sources.get(id(tensor))
            if known is None and isinstance(unwrapped(tensor), FakeTensor):
                known = self._everything
            if known:
                found |= known
            if self._written:
                found |= self._written.get(_memory(tensor), _NOTHING)
        return found

    def refuse_strays(self, tree: Any) -> None:
        """Refuse tensors that a unit created and passed out of it other than by its result.

        Raises:
            PartitionError: there is such a tensor; other stages would lack it.
        """
        for tensor in tensors_in(tree):
            unit = None if id(tensor) in self._sources else self._made_in.get(tensor)
            if unit is not None and unit not in self._excused:
                raise PartitionError(
                    f"container code uses a tensor that unit {unit!r} created and did not return: what it stores "
                    "outside its own modules cannot be sent to another stage. Return it, set it as an attribute of the "
                    "module, or use pp_size=1."
                )

    def excuse(self, unit: str) -> None:
        """Allow this unit's tensors outside of its result: they may be in an object that is handled separately."""
        self._excused.add(unit)

    @contextmanager
    def paused(
        self, unit: str = "", watched: Container[int] = (), read: set[int] | None = None
    ) -> Iterator[dict[int, frozenset[Source]]]:
        """Suspend tracking inside (within a unit); yields the sources of marked tensors that are used there, by id.

        These may be other tensors than the unit's arguments: it may keep references, or find them in an object.

        Args:
            unit: that runs inside.
            watched: the ids of further tensors.
            read: gets those of which more than metadata is used, unless they are marked, too.
        """
        self._paused, self._unit = True, unit
        self._used = {}
        self._watched, self._read = watched, set() if read is None else read
        try:
            yield self._used
        finally:
            self._paused = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = self._result(func, args, kwargs)
        if self._paused:
            self._note(tensors_in((args, kwargs)), tensors_in(result), is_read=func not in METADATA_FUNCTIONS)
            return result
        targets = tensors_in(kwargs.get("out"))
        if writes_first_argument(func) and args:
            targets += tensors_in(args[0])
        outputs = tensors_in(result)
        if not outputs and not targets:
            if func in _READS:
                self.decisions |= self.sources((args, kwargs))
            return result
        self.refuse_strays((args, kwargs))
        sources = self.sources((args, kwargs))
        for target in targets:
            self.written(target, sources)
        for output in (*outputs, *targets):
            self.mark(output, sources | self._sources.get(id(output), _NOTHING))
        return result

    def _result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_grad = func is torch.autograd.grad
        if self._on_derivative is None or not (is_grad or func is Tensor.backward):
            return run_with_known_masks(func, args, kwargs)
        options = GRAD.bind(*args, **kwargs).arguments if is_grad else kwargs
        outputs, inputs = tensors_in(options["outputs"] if is_grad else args[0]), tensors_in(options.get("inputs"))
        if self._paused:
            inner = {id(one) for one in inputs if one in self._made_in and id(one) not in self._sources}
            if not is_grad or len(inner) == len(inputs):
                return func(*args, **kwargs)
        of_inputs = tuple(self.sources(one) for one in inputs)
        note = self._on_derivative()
        seen = SeenDerivative(self.sources(outputs), of_inputs, self._unit if self._paused else "")
        if note is None or not note(seen):
            return func(*args, **kwargs)
        return stand_ins(outputs, inputs, options) if is_grad else None

    def _note(self, arguments: list[Tensor], results: list[Tensor], *, is_read: bool) -> None:
        ids = set(map(id, arguments))
        if is_read:
            self._read.update(one for one in ids if one in self._watched and one not in self._sources)
        for argument in ids & self._sources.keys():
            self._used[argument] = self._sources[argument]
        for result in results:
            if id(result) not in ids:
                self._made_in[result] = self._unit


def _memory(tensor: Tensor) -> int:
    """Identifies the memory that a tensor shares with its views."""
    tensor = unwrapped(tensor)
    return storage_id(tensor) if tensor.layout is torch.strided else id(tensor)
