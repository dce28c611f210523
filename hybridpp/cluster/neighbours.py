"""Ranks of one group on one host: their links, and the collectives made of messages over them."""

import logging
import os
import platform
import secrets
import socket
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hybridpp.cluster.shared_memory import Link, Receiving

_LOGGER = logging.getLogger("hybridpp")

# Every pair has a connection of its own; beyond, there are more of them than a process should have open.
_MAX_RANKS = 16
_TOKEN_BYTES = 16


class Neighbours:
    """All ranks of a group, connected to this one.

    Args:
        links: to each rank of the group, by its place; None at this rank's own.
        rank: this rank's place.
    """

    def __init__(self, links: Sequence[Link | None], rank: int):
        self._links, self._rank = tuple(links), rank

    def link(self, peer: int) -> Link:
        """To another rank, by its place."""
        link = self._links[peer]
        if link is None:
            raise ValueError(f"rank {peer} of this group is this rank itself: it has no link to it.")
        return link

    def exchange(self, outgoing: Sequence[Tensor], shape: torch.Size) -> "Exchange":
        """Start to give every rank its tensor of ``outgoing`` (by its place), and to get one of ``shape`` from each.

        Collective: every rank of the group, with tensors of one shape.
        """
        own = outgoing[self._rank]
        dense = [tensor.contiguous() for tensor in outgoing]
        for link, tensor in zip(self._links, dense, strict=True):
            if link is not None:
                link.send(tensor)
        parts = [own if link is None else torch.empty(shape, dtype=own.dtype) for link in self._links]
        works = [link.receive(part) for link, part in zip(self._links, parts, strict=True) if link is not None]
        return Exchange(parts, works)


class Exchange:
    """Tensors from every rank of a group."""

    def __init__(self, parts: list[Tensor], works: list[Receiving]):
        self._parts, self._works = parts, works

    def wait(self) -> list[Tensor]:
        """What each rank gave, by its place."""
        for work in self._works:
            work.wait()
        return self._parts


class Sum:
    """A sum over a group, which replaces what this rank gave to it."""

    def __init__(self, exchange: Exchange, tensor: Tensor):
        self._exchange, self._tensor = exchange, tensor

    def wait(self) -> None:
        """Return when the sum is there."""
        first, second, *others = self._exchange.wait()
        if others:
            self._tensor.copy_(added([first, second, *others]))
        else:
            torch.add(first, second, out=self._tensor)


def added(parts: Sequence[Tensor]) -> Tensor:
    """The sum of two tensors or more. From the first to the last, so that the bits are alike everywhere."""
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


def connect(process_group: dist.ProcessGroup) -> Neighbours | None:
    """Links between all ranks of a gloo group; None where they are not on one host, or it offers no such links.

    Collective: every rank of the group; all of them get links, or none.
    """
    ranks, rank = dist.get_process_group_ranks(process_group), dist.get_rank(process_group)
    if len(ranks) == 1 or len(ranks) > _MAX_RANKS:
        return None
    timeout_s = process_group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    listener = _listen()
    addresses: list[tuple[bytes, bytes] | None] = [None] * len(ranks)
    token = secrets.token_bytes(_TOKEN_BYTES)
    dist.all_gather_object(addresses, None if listener is None else (listener.getsockname(), token), process_group)
    # The higher of two ranks calls; that it got through says that both are on one host.
    called = [_call(address, rank) for address in addresses[:rank]]
    got_through: list[bool] = [False] * len(ranks)
    dist.all_gather_object(got_through, listener is not None and None not in called, process_group)
    if listener is None or not all(got_through):
        # Not the logger that tells ranks: that needs this file.
        _LOGGER.debug("ranks %s share no memory (one x86 host with Linux is wanted): they use gloo", ranks)
        return None
    answered = _answer(listener, token, len(ranks) - rank - 1, timeout_s)
    sockets = [*called, None, *(answered[peer] for peer in range(rank + 1, len(ranks)))]
    links = [
        None if connection is None else Link(connection, f"rank {peer}", timeout_s)
        for connection, peer in zip(sockets, ranks, strict=True)
    ]
    return Neighbours(links, rank)


def _listen() -> socket.socket | None:
    """A socket that only processes of this host see, and that leaves no file; None where there is no such thing."""
    # See _Counts for the processor.
    if not hasattr(os, "memfd_create") or platform.machine() != "x86_64":
        return None
    try:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(b"\0hybridpp-" + secrets.token_hex(_TOKEN_BYTES).encode())
        listener.listen(_MAX_RANKS)
    except OSError:
        return None
    return listener


def _call(address: tuple[bytes, bytes] | None, rank: int) -> socket.socket | None:
    """A connection to who listens there, introduced by its token and this rank's place."""
    if address is None:
        return None
    name, token = address
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(name)
        connection.sendall(token + bytes([rank]))
    except OSError:  # nobody of that name on this host
        connection.close()
        return None
    return connection


def _answer(listener: socket.socket, token: bytes, num_callers: int, timeout_s: float) -> dict[int, socket.socket]:
    """The connections of those who know the token, by their places."""
    callers: dict[int, socket.socket] = {}
    listener.settimeout(timeout_s)
    while len(callers) < num_callers:
        connection, _ = listener.accept()
        connection.settimeout(timeout_s)
        said = connection.recv(_TOKEN_BYTES + 1, socket.MSG_WAITALL)
        if secrets.compare_digest(said[:_TOKEN_BYTES], token):
            connection.settimeout(None)
            callers[said[_TOKEN_BYTES]] = connection
        else:
            connection.close()
    listener.close()
    return callers
