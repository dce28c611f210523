"""Connect the ranks of a group by shared memory, if all of them can and may."""

import errno
import json
import logging
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hybridpp.cluster.exit_reports import ExitReason, no_exit_reason
from hybridpp.cluster.shared_memory.arena import ARENA_BYTES
from hybridpp.cluster.shared_memory.group import SharedMemoryGroup
from hybridpp.cluster.shared_memory.link import Link
from hybridpp.cluster.shared_memory.linux import map_memory, new_memory, unmap_memory
from hybridpp.cluster.shared_memory.peer_process import no_descriptors
from hybridpp.cluster.shared_memory.socket_rendezvous import SocketAddress, SocketRendezvous
from hybridpp.errors import HybridppError
from hybridpp.nn.torch_private import timeout_of

# Not the logger that names ranks: the world it asks for the rank needs this file.
_LOGGER = logging.getLogger("hybridpp")

# Every pair has its own connection; above this size a process would have too many descriptors open.
_MAX_RANKS = 16
# Time limit for connecting ranks that were present a moment ago; if it is reached, gloo is used.
_PATIENCE_S = 20.0


def connect(
    process_group: dist.ProcessGroup, wanted: bool, name: str = "", exit_reason: ExitReason = no_exit_reason
) -> SharedMemoryGroup | None:
    """Links between all ranks of a gloo group; None if one of them must not share memory, or they are on several hosts.

    Collective: every rank of the group; all of them get links, or none.

    Args:
        process_group: the ranks.
        wanted: whether this rank may share memory.
        name: name of the group in errors.
        exit_reason: why a rank has ended.
    """
    ranks, rank = dist.get_process_group_ranks(process_group), dist.get_rank(process_group)
    if len(ranks) == 1 or len(ranks) > _MAX_RANKS:
        return None
    in_group = f" (group {name})" if name else ""
    peers = [(f"rank {peer}{in_group}", partial(exit_reason, peer)) for peer in ranks]
    timeout_s = timeout_of(process_group).total_seconds()
    with ExitStack() as resources:
        group, failure = None, None
        rendezvous = None
        try:
            rendezvous = resources.enter_context(SocketRendezvous()) if wanted and _is_possible() else None
        except OSError as error:
            failure = _reason(error)
        texts = _gathered(None if rendezvous is None else rendezvous.address.as_text(), process_group)
        addresses = [None if text is None else SocketAddress.of(text) for text in texts]
        unable = [peer for peer, address in zip(ranks, addresses, strict=True) if address is None]
        if rendezvous is not None and (of_all_ranks := _on_one_host(addresses)):
            if not all(_gathered(rendezvous.are_here(of_all_ranks), process_group)):
                _LOGGER.debug("ranks %s use gloo: their hosts have one boot id, as copies of a virtual machine", ranks)
                return None
            try:
                group = _connect_all(rendezvous, of_all_ranks, peers, rank, timeout_s)
                resources.callback(group.close)
            except (HybridppError, OSError) as error:
                failure = _reason(error)
            succeeded = _gathered(group is not None, process_group)
            unable = [peer for peer, success in zip(ranks, succeeded, strict=True) if not success]
            if group is not None and all(succeeded):
                resources.pop_all()
                rendezvous.close()
                return group
    if failure is not None:
        _LOGGER.warning("rank %d could not share memory, so ranks %s use gloo: %s", ranks[rank], ranks, failure)
    else:
        why = f"{unable} of them cannot, or may not" if unable else "they are on several hosts"
        _LOGGER.debug("ranks %s use gloo instead of shared memory: %s", ranks, why)
    return None


def _gathered(value: str | bool | None, process_group: dist.ProcessGroup) -> list[Any]:
    """Every member's value, in the group's order; as JSON, because ranks are known by nothing but their connection.

    Collective: every rank of the group.
    """
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = dist.get_world_size(process_group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([data.numel()]), process_group)
    longest = max(int(length) for length in lengths)
    rows = [torch.zeros(longest, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(rows, torch.nn.functional.pad(data, (0, longest - data.numel())), process_group)
    return [json.loads(bytes(row[: int(length)].tolist())) for row, length in zip(rows, lengths, strict=True)]


def _connect_all(
    rendezvous: SocketRendezvous,
    addresses: Sequence[SocketAddress],
    peers: Sequence[tuple[str, Callable[[], str]]],
    rank: int,
    timeout_s: float,
) -> SharedMemoryGroup:
    """Connections to all ranks of the group, and memory of each."""
    patience_s = min(_PATIENCE_S, timeout_s)
    with ExitStack() as resources:
        links: list[Link | None] = [None] * len(peers)
        connections = rendezvous.connect_all(addresses, rank, patience_s)
        for connection in connections.values():
            resources.callback(connection.close)
        for peer, connection in connections.items():
            made = links[peer] = Link(connection, peers[peer][0], timeout_s, peers[peer][1])
            resources.callback(made.close)
        for link in links:
            if link is not None:
                link.meet(patience_s)
        resources.pop_all()
    return SharedMemoryGroup(links, rank)


def why_impossible() -> str:
    """Why this process cannot share memory with others of its host; empty: it can."""
    if not hasattr(os, "memfd_create"):
        return "the system has no memfd_create"
    if platform.machine() != "x86_64":
        return f"links are for x86_64, and this processor is {platform.machine()}"
    try:
        descriptor = new_memory(ARENA_BYTES)
        try:
            unmap_memory(map_memory(descriptor, ARENA_BYTES, writable=True), ARENA_BYTES)
        finally:
            os.close(descriptor)
    except OSError as error:
        return _reason(error)
    return ""


def _is_possible() -> bool:
    # See message_log.py for the processor.
    return hasattr(os, "memfd_create") and platform.machine() == "x86_64"


def _on_one_host(addresses: Sequence[SocketAddress | None]) -> list[SocketAddress]:
    """All addresses, if each rank has one and all can be reached from here; else none."""
    present = [address for address in addresses if address is not None]
    return present if len(present) == len(addresses) and len({address.host for address in present}) == 1 else []


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return str(no_descriptors())
    if isinstance(error, OSError) and error.errno in (errno.EFBIG, errno.ENOMEM):
        return (
            f"{error.strerror}: {ARENA_BYTES} addresses are wanted for each other rank (memory only as messages need "
            "it). Raise `ulimit -f` and `ulimit -v`, or set HYBRIDPP_SHARED_MEMORY=0."
        )
    return str(error)
