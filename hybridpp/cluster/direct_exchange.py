"""Exchange of large tensors of host memory over gloo, each pair of ranks for itself.

Gloo's own reduce-scatter all-reduces first, and its all-to-all and all-gather copy through buffers of their own: they
take two to three times as long.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hybridpp.cluster.wire_format import as_carried
from hybridpp.cluster.world import Patience, PolledWork

# Other messages between these ranks have tag 0.
_TAG = 1


class DirectExchange:
    """A pending exchange, in which every rank sends a tensor to every other one, and receives one.

    Collective: every rank of the group.

    Args:
        start: starts a message of ``torch.distributed`` in the group: ``start(dist.isend, tensor, group_dst=1)``.
        rank: this rank in the group.
        outgoing: contiguous tensors, by receiver; not to be written to until the end. This rank's own is not sent.
        incoming: contiguous tensors, by sender, that are filled. This rank's own is left as it is.
        under_way: exchanges of the group, in order, to which this one is added. One that nobody waits for (of a batch
            that was read ahead, by an iterator that is gone) stays there until a later one is over: gloo gives what
            comes for a receive that is gone to the next one.
    """

    def __init__(
        self,
        start: Callable[..., PolledWork],
        rank: int,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor],
        under_way: "deque[DirectExchange] | None" = None,
    ) -> None:
        others = [peer for peer in range(len(outgoing)) if peer != rank]
        self._works = [start(dist.irecv, as_carried(incoming[peer]), group_src=peer, tag=_TAG) for peer in others]
        self._works += [start(dist.isend, as_carried(outgoing[peer]), group_dst=peer, tag=_TAG) for peer in others]
        # Gloo holds no reference to them.
        self._tensors = (outgoing, incoming)
        self._under_way: deque[DirectExchange] = deque() if under_way is None else under_way
        self._under_way.append(self)

    def wait(self) -> None:
        """Wait until all has arrived here, and left."""
        for work in self._works:
            work.wait()
        self._is_over()

    def ends_within(self, patience: Patience) -> bool:
        """Whether all has, while there is patience."""
        is_over = all(work.ends_within(patience) for work in self._works)
        if is_over:
            self._is_over()
        return is_over

    def _is_over(self) -> None:
        # Messages arrive in order, so those of earlier exchanges have.
        if self in self._under_way:
            while self._under_way.popleft() is not self:
                pass


def received_beside(own: Tensor, rank: int, size: int) -> list[Tensor]:
    """``own`` at its rank, between new tensors like it."""
    others = own.new_empty((size - 1, *own.shape)).unbind()
    return [*others[:rank], own, *others[rank:]]


def add_into_own(summands: Sequence[Tensor], rank: int) -> Tensor:
    """The sum of tensors, added in order, so that all ranks get the same bits; in ``summands[rank]``.

    Others of them may be written to, too.
    """
    own = total = summands[rank]
    if rank > 1:
        total = summands[0]
    if len(summands) > 1:
        torch.add(summands[0], summands[1], out=total)
    for index, summand in enumerate(summands[2:], 2):
        total = torch.add(total, summand, out=own if index >= rank else total)
    return total
