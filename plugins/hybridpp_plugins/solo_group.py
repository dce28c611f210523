"""A group of which only one member runs, for estimates: its collectives have sizes, and no effect."""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from hybridpp.cluster import Patience

T = TypeVar("T")


class SoloMessage(NamedTuple):
    """A communication that a rank takes part in.

    Attributes:
        kind: ``"all_reduce"``, ``"all_gather"`` or ``"reduce_scatter"``.
        num_bytes: of the complete tensor.
    """

    kind: str
    num_bytes: int


# Of the start of a communication: what is called when the rank waits for its end.
Note: TypeAlias = Callable[[SoloMessage], Callable[[], None]]


class _Done:
    def __init__(self, waited: Callable[[], None] = lambda: None):
        self._waited = waited

    def wait(self) -> None:
        self._waited()


class _Result(Generic[T]):
    def __init__(self, value: T, waited: Callable[[], None]):
        self._value, self._waited = value, waited

    def wait(self) -> T:
        self._waited()
        return self._value

    def ends_within(self, patience: Patience) -> bool:
        return True


class SoloGroup:
    """The first of ``size`` ranks, which runs alone.

    Args:
        size: number of members.
        overlaps: whether a sum proceeds while the rank computes.
        note: called with each communication when it starts; returns what is called when the rank waits for it.
        has_values: whether tensors have values: results of others are operators' results, which would count as such.
    """

    process_group = None
    num_collectives = 0
    transport = "in-process"
    rank = 0

    def __init__(
        self,
        size: int,
        overlaps: bool = False,
        note: Note = lambda message: lambda: None,
        has_values: bool = True,
    ):
        self._has_values = has_values
        self.ranks = tuple(range(size))
        self.size, self.overlaps = size, overlaps
        self._note = note

    def all_reduce(self, tensor: Tensor) -> _Done:
        return _Done(self._note(SoloMessage("all_reduce", tensor.nbytes)))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return self.start_all_gather(tensor).wait()

    def _gathered(self, tensor: Tensor) -> Tensor:
        stacked = tensor.new_empty((self.size, *tensor.shape))
        if self._has_values:
            stacked[:] = tensor.detach()
        return stacked

    def all_gather_along(self, tensor: Tensor, dim: int) -> Tensor:
        waited = self._note(SoloMessage("all_gather", tensor.nbytes * self.size))
        stacked = self._gathered(tensor)
        waited()
        return stacked.flatten(0, 1) if dim % tensor.dim() == 0 else torch.cat(stacked.unbind(), dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        return self.start_reduce_scatter(tensor, dim).wait()

    def start_all_gather(self, tensor: Tensor) -> _Result[list[Tensor]]:
        waited = self._note(SoloMessage("all_gather", tensor.nbytes * self.size))
        return _Result([part.data for part in self._gathered(tensor)], waited)

    def start_reduce_scatter(self, tensor: Tensor, dim: int) -> _Result[Tensor]:
        parts = tensor.chunk(self.size, dim)
        # As in a job: the members' shares must lie in one piece each.
        source = parts if dim % tensor.dim() == 0 else torch.stack(parts)
        waited = self._note(SoloMessage("reduce_scatter", tensor.nbytes))
        own = parts[0].new_empty(parts[0].shape)
        if self._has_values:
            own.copy_(source[0])
        return _Result(own, waited)

    def reduce_scatter_segments(self, flat: Tensor) -> _Done:
        return _Done()

    def all_gather_segments(self, flat: Tensor) -> _Done:
        return _Done()

    def send(self, tensor: Tensor, peer: int) -> _Done:
        return _Done()

    def receive(self, tensor: Tensor, peer: int) -> _Done:
        return _Done()
