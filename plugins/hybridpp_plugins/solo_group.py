"""A group of which only one member runs, for estimates: its collectives have sizes, and no effect."""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

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


class _Done:
    def wait(self) -> None:
        pass


class _Result(Generic[T]):
    def __init__(self, value: T):
        self._value = value

    def wait(self) -> T:
        return self._value

    def ends_within(self, patience: Patience) -> bool:
        return True


class SoloGroup:
    """The first of ``size`` ranks, which runs alone.

    Args:
        size: number of members.
        overlaps: whether a sum proceeds while the rank computes.
        note: called with each communication.
    """

    process_group = None
    num_collectives = 0
    transport = "in-process"
    rank = 0

    def __init__(self, size: int, overlaps: bool = False, note: Callable[[SoloMessage], None] = lambda message: None):
        self.ranks = tuple(range(size))
        self.size, self.overlaps = size, overlaps
        self._note = note

    def all_reduce(self, tensor: Tensor) -> _Done:
        self._note(SoloMessage("all_reduce", tensor.nbytes))
        return _Done()

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self._note(SoloMessage("all_gather", tensor.nbytes * self.size))
        stacked = tensor.new_empty((self.size, *tensor.shape))
        stacked[:] = tensor.detach()
        return [part.data for part in stacked]

    def all_gather_along(self, tensor: Tensor, dim: int) -> Tensor:
        parts = self.all_gather(tensor.contiguous())
        return torch.cat(parts, dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        self._note(SoloMessage("reduce_scatter", tensor.nbytes))
        return torch.stack(tensor.chunk(self.size, dim))[0].clone()

    def start_all_gather(self, tensor: Tensor) -> _Result[list[Tensor]]:
        return _Result(self.all_gather(tensor))

    def start_reduce_scatter(self, tensor: Tensor, dim: int) -> _Result[Tensor]:
        return _Result(self.reduce_scatter(tensor, dim))

    def reduce_scatter_segments(self, flat: Tensor) -> _Done:
        return _Done()

    def all_gather_segments(self, flat: Tensor) -> _Done:
        return _Done()

    def send(self, tensor: Tensor, peer: int) -> _Done:
        return _Done()

    def receive(self, tensor: Tensor, peer: int) -> _Done:
        return _Done()
