"""Interface of the ranks of a job and of their collectives.

All other code uses a ``World`` and its ``Group``s. One implementation is ``torch.distributed`` (``torch_world.py``),
the other is ranks that take turns inside one process (``loopback.py``).
"""

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hybridpp.cluster.common_results import CommonResults
from hybridpp.cluster.progress import Progress
from hybridpp.cluster.stop_request import StopRequest
from hybridpp.errors import PartitionError
from hybridpp.nn.torch_private import has_no_data

T_co = TypeVar("T_co", covariant=True)
_POLL_S = 0.005


def check_real(tensor: Tensor) -> None:
    """Refuse to communicate a tensor without data: a fake tensor, or one on the meta device.

    Raises:
        PartitionError: it has no data; a backend would read from address 0.
    """
    if has_no_data(tensor):
        raise PartitionError(
            f"a tensor without data cannot be communicated: got a {type(tensor).__name__} of shape "
            f"{tuple(tensor.shape)}, as used while a model is traced. Communicate outside of the model's forward, or "
            "skip it there for such tensors."
        )


class Work(Protocol):
    """A pending communication."""

    def wait(self) -> None:
        """Wait until the tensor that it was started with may be read and written again."""


class Patience:
    """How long a rank looks for messages before it ends, in all: it may be that a peer waits for this rank.

    Args:
        seconds: at most.
    """

    def __init__(self, seconds: float):
        self._until = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds that are left; at least 0."""
        return max(0.0, self._until - time.monotonic())

    def until(self, is_ready: Callable[[], bool]) -> bool:
        """Whether something is there, at once or while there is patience."""
        while not is_ready():
            if not self.left_s:
                return False
            time.sleep(min(_POLL_S, self.left_s))
        return True


class PolledWork(Work, Protocol):
    """A pending communication that need not be waited for until it ends."""

    def ends_within(self, patience: Patience) -> bool:
        """Whether it ends while there is patience. Where it does not, its group may not be used any more."""


class Pending(Protocol[T_co]):
    """A pending communication with a result."""

    def wait(self) -> T_co:
        """Wait for the result; call it once. The inputs may be written again afterwards."""

    def ends_within(self, patience: Patience) -> bool:
        """Whether it ends while there is patience. Where it does not, its group may not be used any more."""


class Group(Protocol):
    """A process group; collectives must be called by all members, in the same order. Copies of it are itself.

    Attributes:
        ranks: the members' ranks in the world.
        rank: this process's rank in the group.
        size: number of members.
        process_group: the ``torch.distributed`` group; None if there is none.
        overlaps: whether an all-reduce of activations proceeds while the rank computes; it does not in shared memory.
        transport: what small messages travel by: "shared memory", "gloo", "nccl", or "in-process".
        num_collectives: how many this member has begun.
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
    @property
    def transport(self) -> str: ...
    @property
    def num_collectives(self) -> int: ...

    def all_reduce(self, tensor: Tensor) -> Work:
        """Start an all-reduce (sum) of ``tensor`` in place. Collective."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every member's ``tensor``, in the group's order; all of one shape and dtype. Collective."""

    def all_gather_along(self, tensor: Tensor, dim: int) -> Tensor:
        """Every member's ``tensor`` concatenated along ``dim``, in the group's order; all of one shape. Collective."""

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """This member's shard of the sum over the group, which is split into ``size`` equal parts along ``dim``.
        Collective."""

    def start_all_gather(self, tensor: Tensor) -> Pending[list[Tensor]]:
        """Start :meth:`all_gather`. Collective."""

    def start_reduce_scatter(self, tensor: Tensor, dim: int) -> Pending[Tensor]:
        """Start :meth:`reduce_scatter`. Collective."""

    def reduce_scatter_segments(self, flat: Tensor) -> Work:
        """Start to sum a flat tensor of ``size`` equal segments over the group, in place.

        Afterwards the segment of this member's number is the sum; the others keep what this member gave. Collective.
        """

    def all_gather_segments(self, flat: Tensor) -> Work:
        """Start to fill a flat tensor of ``size`` equal segments with each member's own one, in place. Collective."""

    def send(self, tensor: Tensor, peer: int) -> Work:
        """Start to send a contiguous tensor to the member ``peer`` (its rank in the group)."""

    def receive(self, tensor: Tensor, peer: int) -> Work:
        """Start to receive from the member ``peer`` into a contiguous tensor; in the order of the sends."""


class World(Protocol):
    """All ranks of the job, seen from one of them.

    Attributes:
        rank: this rank.
        size: number of ranks.
        local_rank: this rank among those of its host.
        device: where this rank computes by default.
        progress: what this rank is doing.
        stop: whether the job was told to stop, as this rank knows it.
    """

    stop: StopRequest

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def progress(self) -> Progress: ...

    def carries(self, device: torch.device) -> bool:
        """Whether the groups of this world can communicate tensors of a device."""

    def split(self, groups: Sequence[Sequence[int]], name: str = "", *, point_to_point: bool = False) -> Group | None:
        """The group of this rank, given disjoint lists of ranks; None if it is in none of them.

        Members are numbered by rank, whatever the order of the list (as in ``torch.distributed``). A second call with
        the same lists and name may return a group that shares its messages with the first: independent communication
        needs two names.

        Collective: every rank of the world must call it, with the same lists.

        Args:
            groups: lists of ranks.
            name: name of the groups in errors.
            point_to_point: whether the groups send messages while their ranks compute; the same for groups of one name.
        """

    def meeting(self) -> AbstractContextManager[None]:
        """Inside, all ranks exchange something before they make groups: who is missing is named meanwhile."""

    def release_unused(self) -> None:
        """Give back what groups take that nothing on any rank refers to. Collective: every rank of the world."""

    def release(self, groups: Iterable[Group]) -> None:
        """Close groups that :meth:`split` returned to one caller; whoever split the same lists keeps them.

        Using one of ``groups`` afterwards is an error. Collective: every rank of the world, each with its own groups.
        """

    def common_results(self, kind: Hashable) -> CommonResults | None:
        """Results that ranks of one process compute once; None where ranks are processes.

        Every rank of the world must call it as often, in the same order.

        Args:
            kind: what the results depend on beside their keys; ranks with another one share nothing.
        """

    def control(self) -> Group:
        """The group of all ranks for small host tensors; never waits for a device. Collective at the first call."""


override: ContextVar[World | None] = ContextVar("hybridpp_world", default=None)
"""The world of an in-process rank; takes precedence over ``torch.distributed``."""
