"""Which memory is allocated when, in a run of torch's operators."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks

from hybridpp.nn.torch_private import (
    DisableTorchFunction,
    FakeTensor,
    TorchDispatchMode,
    moves_nothing,
    place_of,
    storage_id,
)


class Allocation:
    """Memory that one operator allocated.

    Attributes:
        size: bytes.
        born: the event at which it was allocated.
        died: the event at which it was freed; None: it is alive.
        savers: events at which autograd saved a tensor in it.
    """

    __slots__ = ("born", "died", "savers", "size")

    def __init__(self, size: int, born: int):
        self.size, self.born = size, born
        self.died: int | None = None
        self.savers: list[int] = []


class AllocationLog(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """A context that records what operators inside allocate, on any device, and when it is freed.

    Memory that a kernel takes and frees while it runs is not seen. Events are numbered: each allocation and each
    release is one.

    Attributes:
        allocations: all, in order.
        event: number of the latest event.
        now, peak: bytes that are alive, and the most there were at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self.allocations: list[Allocation] = []
        self.event = self.now = self.peak = 0
        self._alive: dict[int, Allocation] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # What casts functions, as modes do, has nothing to do with what is asked of tensors here.
        with DisableTorchFunction():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = self._call(func, args, kwargs)
        if not moves_nothing(func):
            self._note(result, args, kwargs)
        return result

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def _note(self, result: Any, args: Any, kwargs: Any) -> None:
        for leaf in tensors_in(result):
            if leaf.is_meta or isinstance(leaf, FakeTensor):
                continue
            key = storage_id(leaf)
            if key not in self._alive and all(storage_id(one) != key for one in tensors_in((args, kwargs))):
                self._follow(leaf)

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        size, key = storage.nbytes(), place_of(storage)
        self.event += 1
        allocation = self._alive[key] = Allocation(size, self.event)
        self.allocations.append(allocation)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        allocation = self._alive.pop(key)
        self.event += 1
        allocation.died = self.event
        self.now -= allocation.size

    def resized(self, storage: UntypedStorage, size: int) -> None:
        """Note that a storage gets another size, which no operator shows."""
        allocation = self._alive.get(place_of(storage))
        if allocation is not None:
            self.now += size - allocation.size
            allocation.size = size
            self.peak = max(self.peak, self.now)

    def of(self, tensor: Tensor) -> Allocation | None:
        """The allocation that a tensor lies in; None: it was allocated outside."""
        return self._alive.get(storage_id(tensor))

    @contextmanager
    def noting_saved(self) -> Iterator[None]:
        """Inside, what autograd saves for a backward pass is noted in the allocations."""

        def pack(tensor: Tensor) -> Tensor:
            allocation = self.of(tensor)
            if allocation is None:
                return tensor
            allocation.savers.append(self.event)
            # The tensor itself may be the result of the operation that saves it: a cycle, which nothing frees.
            return tensor.detach()

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield


def tensors_in(given: Any) -> list[Tensor]:
    """The tensors among what an operator is given, or returns."""
    if isinstance(given, Tensor):
        return [given]
    if isinstance(given, list | tuple):
        return [leaf for one in given for leaf in tensors_in(one)]
    if isinstance(given, dict):
        return [leaf for one in given.values() for leaf in tensors_in(one)]
    return []
