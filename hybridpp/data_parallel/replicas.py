"""The replicas of a model as gradients and weights see them: one group, or sets that divide among themselves."""

from collections import deque
from typing import Protocol

from torch import Tensor

from hybridpp.cluster import Group, Work


class Replicas(Protocol):
    """What reductions and gathers need of the replicas; a :class:`~hybridpp.cluster.Group` has it.

    Attributes:
        size: number of replicas.
    """

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: Tensor) -> Work:
        """As of a group. Collective: all replicas."""

    def reduce_scatter_segments(self, flat: Tensor) -> Work:
        """Start to sum a flat tensor over all replicas, in place; each keeps its own segment. Collective: them all."""

    def all_gather_segments(self, flat: Tensor) -> Work:
        """Start to fill a flat tensor with the segments of those that have the others. Collective: these."""


class HybridReplicas:
    """Replicas in sets, each of which divides among its members what ZeRO divides (hybrid sharding).

    A sum goes over the set first, which leaves one segment to each member, and then over the replicas of all sets that
    have this segment. Weights are gathered in the set. So between sets, which may be on different hosts, only sums of
    segments are sent.

    Args:
        everyone: all replicas.
        shards: the replicas of this one's set, in the order of the segments.
        copies: the replicas of all sets that have this one's segment, in the order of the sets.
    """

    def __init__(self, everyone: Group, shards: Group, copies: Group):
        self.everyone, self.shards, self.copies = everyone, shards, copies
        self.size = everyone.size
        # Sums over the set, whose second part has not begun, in order.
        self._in_set: deque[_SumOverSets] = deque()

    def all_reduce(self, tensor: Tensor) -> Work:
        return self.everyone.all_reduce(tensor)

    def reduce_scatter_segments(self, flat: Tensor) -> Work:
        """The second part of a sum begins in :meth:`go_on`, or when a sum is waited for."""
        total = _SumOverSets(self, flat)
        self._in_set.append(total)
        return total

    def all_gather_segments(self, flat: Tensor) -> Work:
        return self.shards.all_gather_segments(flat)

    def go_on(self, num_left: int = 0) -> None:
        """Begin the second part of the sums that have begun, except the last ``num_left``.

        The host may wait for the first parts, so all replicas must be about to begin them.
        """
        while len(self._in_set) > num_left:
            self._in_set.popleft().begin_second()


class _SumOverSets:
    """A sum over a set of replicas, then of the own segment over all sets."""

    def __init__(self, replicas: HybridReplicas, flat: Tensor):
        self._replicas = replicas
        self._own = flat.detach().view(replicas.shards.size, -1)[replicas.shards.rank]
        self._work = replicas.shards.reduce_scatter_segments(flat)

    def begin_second(self) -> None:
        self._work.wait()
        self._work = self._replicas.copies.all_reduce(self._own)

    def wait(self) -> None:
        self._replicas.go_on()
        self._work.wait()
