"""The ranks of a job and the collectives they call, behind one small interface.

Everything above this file speaks to a ``World`` and its ``Group``s. ``torch.distributed`` is one implementation
(``torch_world.py``), ranks that take turns inside one process are the other (``loopback.py``).
"""

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T_co = TypeVar("T_co", covariant=True)


class Work(Protocol):
    """A communication under way."""

    def wait(self) -> None:
        """Return when the tensor it was started with may be read and written again."""


class Pending(Protocol[T_co]):
    """A communication under way that gives something."""

    def wait(self) -> T_co:
        """What it gives; asked for once. What it was started with may be written again."""


class Group(Protocol):
    """Ranks that communicate with each other; collectives must be called by all of them, in the same order.

    Attributes:
        ranks: the members' ranks in the world.
        rank: this process's place among them.
        size: how many they are.
        process_group: the ``torch.distributed`` group, where there is one.
        overlaps: whether a sum of activations goes on by itself while the rank computes; not where the rank carries it.
    """

    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def process_group(self) -> dist.ProcessGroup | None: ...
    @property
    def overlaps(self) -> bool: ...

    def all_reduce(self, tensor: Tensor) -> Work:
        """Start to replace ``tensor`` by the sum over the group. Collective."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every member's ``tensor``, in the group's order; all of one shape and dtype. Collective."""

    def all_gather_along(self, tensor: Tensor, dim: int) -> Tensor:
        """Every member's ``tensor`` side by side along ``dim``, in the group's order; all of one shape. Collective."""

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """This member's part of the group's sum, in ``size`` equal parts along ``dim``. Collective."""

    def start_all_gather(self, tensor: Tensor) -> Pending[list[Tensor]]:
        """Start :meth:`all_gather`. Collective."""

    def start_reduce_scatter(self, tensor: Tensor, dim: int) -> Pending[Tensor]:
        """Start :meth:`reduce_scatter`. Collective."""

    def send(self, tensor: Tensor, peer: int) -> Work:
        """Start to send a contiguous tensor to the member ``peer`` (its place in the group)."""

    def receive(self, tensor: Tensor, peer: int) -> Work:
        """Start to fill a contiguous tensor with what the member ``peer`` sends; in the order of its sends."""


class World(Protocol):
    """All ranks of the job, seen from one of them.

    Attributes:
        rank: this rank.
        size: number of ranks.
        device: where this rank computes unless told otherwise.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...

    def split(self, groups: Sequence[Sequence[int]]) -> Group | None:
        """The group that this rank is in, out of disjoint lists of ranks; None where it is in none.

        Members are numbered by rank, whatever the order of the list (as ``torch.distributed`` does it).

        Collective: every rank of the world must call it, with the same lists.
        """

    def control(self) -> Group:
        """All ranks, for small host tensors; never waits for a device. Collective at the first call."""


override: ContextVar[World | None] = ContextVar("hybridpp_world", default=None)
"""The world of an in-process rank; takes precedence over ``torch.distributed``."""
