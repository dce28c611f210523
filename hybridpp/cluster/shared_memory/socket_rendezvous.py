"""Connect the ranks of one host: they listen on abstract Unix sockets, and higher ranks call lower ones.

Any process on the host can see such a name and call. So the kernel is asked for the caller's user, calls are handled as
they arrive, so that a silent one does not block others, and there is a time limit.
"""

import contextlib
import errno
import json
import os
import secrets
import select
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple

from hybridpp.cluster.shared_memory.peer_process import peer_uid
from hybridpp.errors import PeerError

_TOKEN_BYTES = 16
_INTRODUCTION_BYTES = _TOKEN_BYTES + 1
# The kernel's own limit is lower.
_BACKLOG = 65535
# Largest number of callers that have not identified themselves; above it, the oldest is rejected.
_MAX_CALLERS = 64
# Interval between calls to a rank whose backlog is full.
_RETRY_S = 5e-3


class SocketAddress(NamedTuple):
    """Where a rank listens.

    Attributes:
        host: identifies the kernel and the network namespace that processes must share.
        name: of the socket.
        token: secret that callers must send.
    """

    host: tuple[str, int, int]
    name: bytes
    token: bytes

    def as_text(self) -> str:
        """As JSON."""
        return json.dumps([self.host, self.name.hex(), self.token.hex()])

    @classmethod
    def of(cls, text: str) -> "SocketAddress":
        """From JSON."""
        (boot, network, user), name, token = json.loads(text)
        return cls((boot, network, user), bytes.fromhex(name), bytes.fromhex(token))


class SocketRendezvous:
    """This rank's part in connecting the ranks of a group.

    Raises:
        OSError: the system has no such sockets, or no free descriptors.
    """

    def __init__(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            # An abstract name: no file is left behind.
            self._listener.bind(b"\0hybridpp-" + secrets.token_hex(_TOKEN_BYTES).encode())
            self._listener.listen(_BACKLOG)
            self._listener.setblocking(False)
            self.address = SocketAddress(_host(), self._listener.getsockname(), secrets.token_bytes(_TOKEN_BYTES))
        except OSError:
            self._listener.close()
            raise
        self._poll = select.poll()
        self._poll.register(self._listener, select.POLLIN)
        self._callers: dict[int, tuple[socket.socket, bytes]] = {}
        self._connections: dict[int, socket.socket] = {}

    @staticmethod
    def are_here(addresses: Sequence[SocketAddress]) -> bool:
        """Whether all ranks listen on this very host, where they say that they do.

        Virtual machines that were started from one snapshot have one boot id, and the numbers of their first namespaces
        are always equal.
        """
        for address in addresses:
            # Of other errors, connecting tells.
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
                probe.setblocking(False)
                try:
                    probe.connect(address.name)
                except ConnectionRefusedError:
                    return False
        return True

    def connect_all(self, addresses: Sequence[SocketAddress], rank: int, timeout_s: float) -> dict[int, socket.socket]:
        """Connections to all other ranks, by their ranks in the group; of two ranks, the higher one connects.

        Args:
            addresses: of all ranks, in the group's order.
            rank: this rank in the group.
            timeout_s: time limit in seconds.

        Raises:
            PeerError: it took longer, or a rank does not listen.
            OSError: there are no descriptors.
        """
        until = time.monotonic() + timeout_s
        others = set(range(len(addresses))) - {rank}
        while True:
            for peer in sorted(others - self._connections.keys()):
                connection = _connect_to(addresses[peer], rank) if peer < rank else None
                if connection is not None:
                    self._connections[peer] = connection
            missing = sorted(others - self._connections.keys())
            if not missing:
                connections, self._connections = self._connections, {}
                return connections
            left = until - time.monotonic()
            if left < 0:
                raise PeerError(f"ranks {missing} of the group were not reached in {timeout_s:.0f} s.")
            self._serve(min(left, _RETRY_S) if missing[0] < rank else left, others - set(range(rank)))

    def _serve(self, seconds: float, expected: set[int]) -> None:
        """Accept calls, and read what callers send."""
        for descriptor, _ in self._poll.poll(seconds * 1e3):
            if descriptor == self._listener.fileno():
                self._accept()
            elif descriptor in self._callers:
                self._read_introduction(descriptor, expected)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        if peer_uid(connection) != os.geteuid():
            connection.close()
            return
        if len(self._callers) == _MAX_CALLERS:
            self._reject(next(iter(self._callers)))
        connection.setblocking(False)
        self._callers[connection.fileno()] = connection, b""
        self._poll.register(connection, select.POLLIN)

    def _read_introduction(self, descriptor: int, expected: set[int]) -> None:
        connection, received = self._callers[descriptor]
        try:
            more = connection.recv(_INTRODUCTION_BYTES - len(received))
        except BlockingIOError:
            return
        except ConnectionResetError:
            more = b""
        received += more
        if more and len(received) < _INTRODUCTION_BYTES:
            self._callers[descriptor] = connection, received
            return
        token, rank = received[:_TOKEN_BYTES], received[_TOKEN_BYTES:]
        if (
            secrets.compare_digest(token, self.address.token)
            and rank
            and rank[0] in expected - self._connections.keys()
        ):
            self._connections[rank[0]] = connection
            self._poll.unregister(connection)
            del self._callers[descriptor]
        else:
            self._reject(descriptor)

    def _reject(self, descriptor: int) -> None:
        connection, _ = self._callers.pop(descriptor)
        self._poll.unregister(connection)
        connection.close()

    def __enter__(self) -> "SocketRendezvous":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening, and close the connections that :meth:`connect_all` did not return."""
        self._listener.close()
        for connection in (*self._connections.values(), *(connection for connection, _ in self._callers.values())):
            connection.close()


def _connect_to(address: SocketAddress, rank: int) -> socket.socket | None:
    """A connection to the rank that listens there, opened with its token and this rank; None: its backlog is full."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.setblocking(False)
        connection.connect(address.name)
        connection.sendall(address.token + bytes([rank]))
    except (BlockingIOError, BrokenPipeError, ConnectionResetError):
        connection.close()
        return None
    except OSError as error:
        connection.close()
        if error.errno in (errno.ECONNREFUSED, errno.ENOENT):
            raise PeerError(
                "a rank of this host does not listen for the others: it failed, or has given up."
            ) from error
        raise
    return connection


def _host() -> tuple[str, int, int]:
    # Unread, no other rank is known to be on this host: the first namespaces of two hosts may have equal numbers.
    boot = secrets.token_hex()
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    # Containers may have networks and users of their own.
    return boot, os.stat("/proc/self/ns/net").st_ino, os.stat("/proc/self/ns/user").st_ino
