"""Messages between two processes of one host, through memory that both see.

The sender copies a message into memory that it made, the receiver out of it; a Unix socket carries the 16 bytes that
say so. TCP, which gloo uses, copies through the kernel, and wakes a thread of its own on either side.
"""

import contextlib
import ctypes
import mmap
import os
import select
import socket
import struct
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from enum import IntEnum, auto
from typing import NamedTuple

from torch import Tensor

from hybridpp.errors import PeerError

_SPIN_S = 1e-3


class _Kind(IntEnum):
    MESSAGE = auto()  # piece ``piece`` of the sender's memory holds ``size`` bytes
    FIRST_MESSAGE = auto()  # the same; the piece is new, and its descriptor comes along
    ASKED = auto()  # the receiver has asked for one message more
    TAKEN = auto()  # piece ``piece`` may be written again


class _Record(NamedTuple):
    kind: int
    piece: int = 0
    size: int = 0


_RECORD = struct.Struct("<IIQ")
_DESCRIPTOR = struct.Struct("@i")
_READ_BYTES = 256 * _RECORD.size
# As many as the kernel passes on at once.
_DESCRIPTORS_BYTES = socket.CMSG_SPACE(253 * _DESCRIPTOR.size)


class _Piece:
    """Memory that other processes, which are given its descriptor, see as well."""

    def __init__(self, descriptor: int, size: int):
        self._mapped = mmap.mmap(descriptor, size)
        self.size = size
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapped))


class Link:
    """One end of a connection to another process: messages arrive in the order they were sent, both ways.

    Sending never waits. What is under way is held in pieces of the sender's memory, which are used again: there are as
    many as messages were ever under way at once.

    Args:
        connection: a connected Unix socket (a stream) whose other end is a ``Link``, too.
        peer: what errors call it: ``"rank 1"``.
        timeout_s: a peer that says nothing for so long is an error.
    """

    def __init__(self, connection: socket.socket, peer: str, timeout_s: float):
        # By the kernel, not by settimeout, with which Python asks twice for each read.
        patience = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._peer, self._timeout_s = peer, timeout_s
        self._mine: list[_Piece] = []
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._theirs: dict[int, _Piece] = {}
        self._arrived: deque[_Record] = deque()
        self._expected: deque[Receiving] = deque()
        self._num_sent = self._num_asked = 0

    def send(self, tensor: Tensor) -> "Sending":
        """Send a contiguous tensor of host memory; it may be changed at once."""
        self._read(wait=False)
        number, descriptor = self._piece(tensor.nbytes)
        ctypes.memmove(self._mine[number].address, tensor.data_ptr(), tensor.nbytes)
        try:
            if descriptor is None:
                self._connection.sendall(_RECORD.pack(_Kind.MESSAGE, number, tensor.nbytes))
            else:
                record = _RECORD.pack(_Kind.FIRST_MESSAGE, number, tensor.nbytes)
                socket.send_fds(self._connection, [record], [descriptor])
        except OSError as error:
            raise self._is_gone() from error
        finally:
            if descriptor is not None:
                os.close(descriptor)
        self._num_sent += 1
        return Sending(self, self._num_sent)

    def receive(self, tensor: Tensor) -> "Receiving":
        """Ask for the next message, which is as large as ``tensor``, contiguous and in host memory."""
        self._tell(_Record(_Kind.ASKED))
        receiving = Receiving(self, tensor)
        self._expected.append(receiving)
        return receiving

    def wait_until_asked(self, number: int) -> None:
        """Return when the peer has asked for so many messages."""
        while self._num_asked < number:
            self._read(wait=True)

    def take(self) -> None:
        """Wait for the next message, and fill the tensor that has waited for longest."""
        while not self._arrived:
            self._read(wait=True)
        _, piece, size = self._arrived.popleft()
        receiving = self._expected.popleft()
        tensor = receiving.tensor
        if tensor.nbytes != size:
            raise PeerError(
                f"{self._peer} sent {size} bytes for a tensor of {tensor.nbytes} ({tuple(tensor.shape)}, "
                f"{tensor.dtype}): the ranks do not do the same. Start all of them with one script, model and batch."
            )
        ctypes.memmove(tensor.data_ptr(), self._theirs[piece].address, size)
        receiving.is_done = True
        self._tell(_Record(_Kind.TAKEN, piece))

    def _piece(self, size: int) -> tuple[int, int | None]:
        """The number of a piece that is free; and its descriptor, if the peer does not know it yet."""
        # Powers of two, so that messages of many sizes find one.
        capacity = 1 << (max(size, mmap.PAGESIZE) - 1).bit_length()
        if self._free[capacity]:
            return self._free[capacity].pop(), None
        descriptor = os.memfd_create("hybridpp")
        os.ftruncate(descriptor, capacity)
        self._mine.append(_Piece(descriptor, capacity))
        return len(self._mine) - 1, descriptor

    def _tell(self, record: _Record) -> None:
        # To one that is gone nothing need be said. Whether it still owes a message, reading will show.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.sendall(_RECORD.pack(*record))

    def _read(self, wait: bool) -> None:
        """Take note of what the peer has said; if nothing, wait until it does."""
        if wait:
            self._spin()
        flags = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
        try:
            said, extra, _, _ = self._connection.recvmsg(_READ_BYTES, _DESCRIPTORS_BYTES, flags)
        except BlockingIOError:
            if wait:
                raise PeerError(
                    f"{self._peer} said nothing for {self._timeout_s:.0f} s. It hangs, or does something else: all "
                    "ranks must call together what communicates."
                ) from None
            return
        except ConnectionResetError:
            said, extra = b"", []
        if wait and not said:
            raise self._is_gone()
        new = (number for _, _, numbers in extra for (number,) in _DESCRIPTOR.iter_unpack(numbers))
        for record in map(_Record._make, _RECORD.iter_unpack(said)):
            self._note(record, new)

    def _spin(self) -> None:
        """Stay awake for as long as most waits take: a processor that goes to sleep is late to wake, in a virtual
        machine by up to milliseconds. Others may have it meanwhile.
        """
        until = time.perf_counter() + _SPIN_S
        while not self._poll.poll(0) and time.perf_counter() < until:
            os.sched_yield()

    def _note(self, record: _Record, new: Iterator[int]) -> None:
        if record.kind == _Kind.ASKED:
            self._num_asked += 1
        elif record.kind == _Kind.TAKEN:
            self._free[self._mine[record.piece].size].append(record.piece)
        else:
            if record.kind == _Kind.FIRST_MESSAGE:
                descriptor = next(new)
                self._theirs[record.piece] = _Piece(descriptor, os.fstat(descriptor).st_size)
                os.close(descriptor)
            self._arrived.append(record)

    def _is_gone(self) -> PeerError:
        return PeerError(f"{self._peer} is gone: its process has ended. Its own error says why.")


class Sending:
    """A message on its way to the peer, which need not have asked for it yet."""

    __slots__ = ("_link", "_number")

    def __init__(self, link: Link, number: int):
        self._link, self._number = link, number

    def wait(self) -> None:
        """Return when the peer has asked for it."""
        self._link.wait_until_asked(self._number)


class Receiving:
    """A message that was asked for."""

    __slots__ = ("_link", "is_done", "tensor")

    def __init__(self, link: Link, tensor: Tensor):
        self._link, self.tensor = link, tensor
        self.is_done = False

    def wait(self) -> None:
        """Return when the tensor is filled, and those that were asked for before."""
        while not self.is_done:
            self._link.take()
