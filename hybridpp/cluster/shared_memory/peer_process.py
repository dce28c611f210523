"""The process of another rank of this host: wake it, and detect its end."""

import contextlib
import errno
import os
import select
import socket
import struct

from hybridpp.cluster.exit_reports import NO_REPORT
from hybridpp.errors import PeerError, ResourceError

# The first bytes on a connection, sent with a descriptor. Later bytes only wake the peer.
_GREETING = b"hybridpp"
_WAKE = b"\0"
_READ_BYTES = 4096
_CREDENTIALS = struct.Struct("@iII")
_DESCRIPTOR = struct.Struct("@i")
# Room for more than one, so that all descriptors of a faulty caller are received and closed.
_DESCRIPTORS_BYTES = socket.CMSG_SPACE(8 * _DESCRIPTOR.size)


class PeerProcess:
    """The other end of a Unix socket.

    Its end shows in two ways. The socket shows it, unless a process that was forked from the peer holds it open
    (workers that load data, for example). The system reports the end of the peer's process, unless that has no id in
    this container.

    Args:
        connection: a connected stream, which is closed with this; only this process uses it.

    Attributes:
        has_ended: whether it is known to have ended or closed the connection.
    """

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self.has_ended = False
        self._pidfd: int | None = None
        try:
            self._pidfd = _pidfd_open(peer_pid(connection))
        except ProcessLookupError:
            self.has_ended = True
        connection.setblocking(False)
        self._poll = select.poll()
        for descriptor in (connection.fileno(), self._pidfd):
            if descriptor is not None:
                self._poll.register(descriptor, select.POLLIN)

    def wake(self) -> None:
        """Wake the peer if it sleeps; never blocks.

        Raises:
            BrokenPipeError, ConnectionResetError: it has ended.
        """
        try:
            self._connection.send(_WAKE)
        except OSError as error:
            # If the socket is full of unread bytes, one more is not needed; and a sleeping peer polls from time to
            # time.
            if error.errno not in (errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM):
                raise

    def sleep(self, seconds: float) -> None:
        """Sleep until woken, until the peer has ended, or for so many seconds (0: poll)."""
        for descriptor, _ in self._poll.poll(seconds * 1e3):
            if descriptor == self._pidfd or not self._drain():
                self.has_ended = True

    def _drain(self) -> bool:
        """Read pending bytes; returns whether more may follow."""
        try:
            return self._connection.recv(_READ_BYTES) != b""
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False

    def greet(self, descriptor: int) -> None:
        """Send a descriptor; the first message on either side.

        Raises:
            BrokenPipeError, ConnectionResetError: it has ended.
        """
        socket.send_fds(self._connection, [_GREETING], [descriptor])

    def greeting(self, peer: str) -> int | None:
        """The descriptor in the peer's greeting; None if there is no greeting yet.

        Raises:
            PeerError: something else came, or nothing will; named ``peer``.
            ResourceError: this process has no descriptor left.
        """
        try:
            received, extra, flags, _ = self._connection.recvmsg(
                len(_GREETING), _DESCRIPTORS_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except ConnectionResetError:
            received, extra, flags = b"", [], 0
        descriptors: list[int] = [number for _, _, data in extra for (number,) in _DESCRIPTOR.iter_unpack(data)]
        if received == _GREETING and len(descriptors) == 1:
            return descriptors[0]
        for descriptor in descriptors:
            os.close(descriptor)
        if flags & socket.MSG_CTRUNC and not descriptors:
            raise no_descriptors()
        if not received:
            raise PeerError(f"{peer} is gone: its process has ended. {NO_REPORT}")
        raise PeerError(f"{peer} did not greet as a rank does. Start all ranks with one version of hybridpp.")

    def sleep_until_greeted(self, seconds: float) -> None:
        """Sleep until the peer has greeted or ended, or for so many seconds. Call it only before the greeting was
        read."""
        for descriptor, _ in self._poll.poll(seconds * 1e3):
            if descriptor == self._pidfd:
                self.has_ended = True

    def shut_down(self) -> None:
        """Shut the connection down for both sides, also in forked processes."""
        # The peer may have shut it down already.
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptors, including the connection's."""
        self._connection.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def no_descriptors() -> ResourceError:
    """The error of a process that has reached its limit of open descriptors."""
    return ResourceError(
        "no descriptor left for memory that ranks of one host share: this process may have "
        f"{os.sysconf('SC_OPEN_MAX')} open. Raise the limit (`ulimit -n`), close what is not used, or set "
        "HYBRIDPP_SHARED_MEMORY=0."
    )


def peer_pid(connection: socket.socket) -> int:
    """Process id of the other end when the connection was made; 0 if it has none in this container."""
    return _credentials(connection)[0]


def peer_uid(connection: socket.socket) -> int:
    """User id of the process at the other end."""
    return _credentials(connection)[1]


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(data)
    return pid, uid, gid


def _pidfd_open(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None if the system has none."""
    if not hasattr(os, "pidfd_open") or pid == 0:
        return None
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        # Linux before 5.3, and containers that forbid it.
        if error.errno in (errno.ENOSYS, errno.EPERM):
            return None
        raise
