"""Follow values through the glue between units: which unit outputs and parameters a tensor was made from."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from hybridpp.partition.structure import tensors_in


class Value(NamedTuple):
    """One tensor that a unit call returned: the call's place in the forward, the leaf of its output."""

    call: int
    leaf: int


Source: TypeAlias = Value | str
"""What a tensor may stem from: a unit's output, or a parameter by its name."""

_NOTHING: frozenset[Source] = frozenset()


class TaintMode(TorchFunctionMode):
    """While active, every torch function passes the sources of its arguments on to its results.

    A fake tensor whose origin was not seen (made inside a function that torch does not show) counts as made from
    every value so far: too much travels then, but nothing is missing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sources: dict[int, frozenset[Source]] = {}
        # What was written in place, by the memory it went to: views of that memory see it too.
        self._written: dict[int, frozenset[Source]] = {}
        # Keeps every marked tensor alive: an id stays its own as long as the tensor does.
        self._alive: list[Tensor] = []
        self._everything: frozenset[Source] = _NOTHING
        self._paused = False
        self._used: dict[int, frozenset[Source]] = {}

    def mark(self, tensor: Tensor, sources: Iterable[Source]) -> None:
        """Set where a tensor stems from, forgetting what was known of it."""
        self._sources[id(tensor)] = frozenset(sources)
        self._everything |= {source for source in self._sources[id(tensor)] if isinstance(source, Value)}
        self._alive.append(tensor)

    def written(self, tensor: Tensor, sources: Iterable[Source]) -> None:
        """Note what a tensor was overwritten with, in whole or in part."""
        memory = _memory(tensor)
        self._written[memory] = self._written.get(memory, _NOTHING) | frozenset(sources)
        self._alive.append(tensor)

    def sources(self, tree: Any) -> frozenset[Source]:
        """Everything that the tensors in ``tree`` stem from."""
        found = _NOTHING
        for tensor in tensors_in(tree):
            known = self._sources.get(id(tensor))
            if known is None and isinstance(_unwrapped(tensor), FakeTensor):
                known = self._everything
            if known:
                found |= known
            if self._written:
                found |= self._written.get(_memory(tensor), _NOTHING)
        return found

    @contextmanager
    def paused(self) -> Iterator[dict[int, frozenset[Source]]]:
        """Follow nothing inside (a unit's own work); gives the sources of marked tensors that are used there, by id.

        They may be others than the unit's arguments: it may hold on to some, or find them in an object.
        """
        self._paused = True
        self._used = {}
        try:
            yield self._used
        finally:
            self._paused = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._paused:
            for tensor in tensors_in((args, kwargs)):
                if id(tensor) in self._sources:
                    self._used[id(tensor)] = self._sources[id(tensor)]
            return result
        sources = self.sources((args, kwargs))
        targets = tensors_in(kwargs.get("out"))
        if _writes_first_argument(func) and args:
            targets += tensors_in(args[0])
        for target in targets:
            self.written(target, sources)
        for output in (*tensors_in(result), *targets):
            self.mark(output, sources | self._sources.get(id(output), _NOTHING))
        return result


def _memory(tensor: Tensor) -> int:
    """What a tensor shares with its views."""
    tensor = _unwrapped(tensor)
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _unwrapped(tensor: Tensor) -> Tensor:
    """A tensor inside ``torch.func`` transforms (models make masks with ``vmap``) without their wrappers."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _writes_first_argument(func: Any) -> bool:
    name: str = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
