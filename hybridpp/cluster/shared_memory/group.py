"""A group of ranks on one host: their links, and collectives over these."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridpp.cluster.progress import Awaited, Progress
from hybridpp.cluster.shared_memory.link import Link, ReceiveWork
from hybridpp.cluster.shared_memory.message_log import Channel
from hybridpp.cluster.world import Patience


class SharedMemoryGroup:
    """The links from this rank to all other ranks of a group.

    Args:
        links: the link to each rank of the group; None for this rank.
        rank: this rank in the group.
    """

    def __init__(self, links: Sequence[Link | None], rank: int):
        self._links, self._rank = tuple(links), rank

    def link(self, peer: int) -> Link:
        """The link to another rank of the group."""
        link = self._links[peer]
        if link is None:
            raise ValueError(f"rank {peer} of this group is this rank itself: it has no link to it.")
        return link

    def tell_waits(self, progress: Progress, ranks: Sequence[int], name: str) -> None:
        """Tell ``progress`` of every wait for another rank; ``ranks`` and ``name`` are the group's."""
        for rank, link in zip(ranks, self._links, strict=True):
            if link is not None:
                link.progress, link.awaited = progress, Awaited("a message", (rank,), name)

    def leave(self) -> None:
        """Tell all other ranks that this one leaves the job in order."""
        for link in self._links:
            if link is not None:
                link.leave()

    def has_left(self, peer: int) -> bool:
        """Whether another rank has left the job in order."""
        link = self._links[peer]
        return link is not None and link.has_left

    def close(self) -> None:
        """Close every link; may be called again. Peers can still read sent messages."""
        for link in self._links:
            if link is not None:
                link.close()

    def exchange(self, outgoing: Sequence[Tensor], shape: torch.Size) -> "PendingExchange":
        """Start an all-to-all: send each rank its tensor of ``outgoing``, and receive one of ``shape`` from each.

        Collective: every rank of the group, with tensors of one shape.
        """
        own = outgoing[self._rank]
        dense = [tensor.contiguous() for tensor in outgoing]
        for link, tensor in zip(self._links, dense, strict=True):
            if link is not None:
                link.send(tensor, Channel.COLLECTIVE)
        parts = [own if link is None else torch.empty(shape, dtype=own.dtype) for link in self._links]
        works = [
            link.receive(part, Channel.COLLECTIVE)
            for link, part in zip(self._links, parts, strict=True)
            if link is not None
        ]
        return PendingExchange(parts, works)


class PendingExchange:
    """A pending all-to-all."""

    def __init__(self, parts: list[Tensor], works: list[ReceiveWork]):
        self._parts, self._works = parts, works

    def wait(self) -> list[Tensor]:
        """Wait for the tensors of all ranks, in the group's order."""
        for work in self._works:
            work.wait()
        return self._parts

    def ends_within(self, patience: Patience) -> bool:
        """Whether all tensors come while there is patience; it takes what has arrived."""
        return all(patience.until(work.is_ready) for work in self._works)


class PendingSum:
    """A pending all-reduce (sum), in place."""

    def __init__(self, exchange: PendingExchange, tensor: Tensor):
        self._pending: tuple[PendingExchange, Tensor] | None = (exchange, tensor)

    @property
    def is_done(self) -> bool:
        """Whether it has been waited for."""
        return self._pending is None

    def wait(self) -> None:
        """Wait until the tensor holds the sum; may be called again."""
        if self._pending is None:
            return
        (exchange, tensor), self._pending = self._pending, None
        first, second, *others = exchange.wait()
        if others:
            tensor.copy_(sum_in_order([first, second, *others]))
        else:
            torch.add(first, second, out=tensor)


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum of two or more tensors, added in order, so that all ranks get the same bits."""
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total
