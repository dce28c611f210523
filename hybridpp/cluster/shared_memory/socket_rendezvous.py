"""Connect the ranks of one host: they listen on abstract Unix sockets, and higher ranks call lower ones.

Any process on the host can see such a name and call. So the kernel is asked for the caller's user, calls are handled as
they arrive, so that a silent one does not block others, and there is a time limit.
"""

import contextlib
import errno
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

    def connect_all(self, addresses: Sequence[SocketAddress], rank: int, timeout_s: float) -> dict[int, socket.socket]:
        """Connections to all other ranks, by their places: the higher of two calls.

        Args:
            addresses: of all ranks, by their places.
            rank: this rank's place.
            timeout_s: time limit in seconds.

        Raises:
            PeerError: it took longer, or a rank does not listen.
            OSError: there are no descriptors.
        """
        until = time.monotonic() + timeout_s
        others = set(range(len(addresses))) - {rank}
        while True:
            for peer in sorted(others - self._connections.keys()):
                connection = _call(addresses[peer], rank) if peer < rank else None
                if connection is not None:
                    self._connections[peer] = connection
            missing = sorted(others - self._connections.keys())
            if not missing:
                met, self._connections = self._connections, {}
                return met
            left = until - time.monotonic()
            if left < 0:
                raise PeerError(f"the ranks at places {missing} of the group were not reached in {timeout_s:.0f} s.")
            self._answer(min(left, _RETRY_S) if missing[0] < rank else left, others - set(range(rank)))

    def _answer(self, seconds: float, expected: set[int]) -> None:
        """Accept calls, and read what callers send."""
        for descriptor, _ in self._poll.poll(seconds * 1e3):
            if descriptor == self._listener.fileno():
                self._accept()
            elif descriptor in self._callers:
                self._listen_to(descriptor, expected)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        if peer_uid(connection) != os.geteuid():
            connection.close()
            return
        if len(self._callers) == _MAX_CALLERS:
            self._turn_away(next(iter(self._callers)))
        connection.setblocking(False)
        self._callers[connection.fileno()] = connection, b""
        self._poll.register(connection, select.POLLIN)

    def _listen_to(self, descriptor: int, expected: set[int]) -> None:
        connection, said = self._callers[descriptor]
        try:
            more = connection.recv(_INTRODUCTION_BYTES - len(said))
        except BlockingIOError:
            return
        except ConnectionResetError:
            more = b""
        said += more
        if more and len(said) < _INTRODUCTION_BYTES:
            self._callers[descriptor] = connection, said
            return
        token, rank = said[:_TOKEN_BYTES], said[_TOKEN_BYTES:]
        if (
            secrets.compare_digest(token, self.address.token)
            and rank
            and rank[0] in expected - self._connections.keys()
        ):
            self._connections[rank[0]] = connection
            self._poll.unregister(connection)
            del self._callers[descriptor]
        else:
            self._turn_away(descriptor)

    def _turn_away(self, descriptor: int) -> None:
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


def _call(address: SocketAddress, rank: int) -> socket.socket | None:
    """A connection to who listens there, introduced by its token and this rank's place; None: it has no time yet."""
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
    boot = ""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    # Containers may have networks and users of their own.
    return boot, os.stat("/proc/self/ns/net").st_ino, os.stat("/proc/self/ns/user").st_ino
