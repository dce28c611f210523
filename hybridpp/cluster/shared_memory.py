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


class _Kind(IntEnum):
    COUNTS = auto()  # the first: the descriptor of the sender's counts comes along
    MESSAGE = auto()  # piece ``piece`` of the sender's memory holds ``size`` bytes
    FIRST_MESSAGE = auto()  # the same; the piece is new, and its descriptor comes along


class _Record(NamedTuple):
    kind: int
    piece: int = 0
    size: int = 0


_RECORD = struct.Struct("<IIQ")
_DESCRIPTOR = struct.Struct("@i")
_READ_BYTES = 256 * _RECORD.size
# As many as the kernel passes on at once.
_DESCRIPTORS_BYTES = socket.CMSG_SPACE(253 * _DESCRIPTOR.size)

# How long a rank that waits stays awake. A processor that goes to sleep is late to wake, in a virtual machine by up to
# milliseconds.
_SPIN_S = 1e-3
# How often a rank that waits for longer looks at counts, which wake nobody.
_LOOK_S = 2e-4


class _Memory:
    """Memory that other processes, which are given its descriptor, see as well."""

    def __init__(self, descriptor: int, size: int):
        self._mapped = mmap.mmap(descriptor, size)
        self.size = size
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapped))


class _Counts(_Memory):
    """How many messages a process has asked its peer for, and how many it has taken.

    They are in memory and no records, because a record that the peer does not read in time would hold up who sends it.
    A processor must keep its writes in order behind its reads for that, as x86 does.
    """

    def __init__(self, descriptor: int):
        super().__init__(descriptor, mmap.PAGESIZE)
        self._numbers = (ctypes.c_uint64 * 2).from_address(self.address)

    @property
    def asked(self) -> int:
        return self._numbers[0]

    @property
    def taken(self) -> int:
        return self._numbers[1]

    def ask(self) -> None:
        self._numbers[0] += 1

    def take(self) -> None:
        self._numbers[1] += 1


class Link:
    """One end of a connection to another process: messages arrive in the order they were sent, both ways.

    Sending waits for nobody, unless the peer leaves hundreds of messages unread. What is under way is held in pieces of
    the sender's memory, which are used again: there are as many as messages were ever under way at once.

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
        self._pieces: list[_Memory] = []
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._under_way: deque[int] = deque()
        self._their_pieces: dict[int, _Memory] = {}
        self._arrived: deque[_Record] = deque()
        self._expected: deque[Receiving] = deque()
        self._num_sent = self._num_free_again = 0
        self._their_counts: _Counts | None = None
        self._has_ended = False
        descriptor = _new_memory(mmap.PAGESIZE)
        self._counts = _Counts(descriptor)
        # A peer that has ended already is no error before something is wanted of it.
        with contextlib.suppress(PeerError):
            self._tell(_Record(_Kind.COUNTS), descriptor)

    def send(self, tensor: Tensor) -> "Sending":
        """Send a contiguous tensor of host memory; it may be changed at once."""
        self._reclaim()
        number, descriptor = self._piece(tensor.nbytes)
        ctypes.memmove(self._pieces[number].address, tensor.data_ptr(), tensor.nbytes)
        kind = _Kind.MESSAGE if descriptor is None else _Kind.FIRST_MESSAGE
        self._tell(_Record(kind, number, tensor.nbytes), descriptor)
        self._under_way.append(number)
        self._num_sent += 1
        return Sending(self, self._num_sent)

    def receive(self, tensor: Tensor) -> "Receiving":
        """Ask for the next message, which is as large as ``tensor``, contiguous and in host memory."""
        self._counts.ask()
        receiving = Receiving(self, tensor)
        self._expected.append(receiving)
        return receiving

    def wait_until_asked(self, number: int) -> None:
        """Return when the peer has asked for so many messages."""
        until = time.monotonic() + self._timeout_s
        while self._known_counts().asked < number:
            self._read(wait=False)
            if self._has_ended and self._known_counts().asked < number:
                raise self._is_gone()
            if time.monotonic() > until:
                raise self._is_silent()
            time.sleep(_LOOK_S)

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
        ctypes.memmove(tensor.data_ptr(), self._their_pieces[piece].address, size)
        self._counts.take()
        receiving.is_done = True

    def _known_counts(self) -> _Counts:
        while self._their_counts is None:
            self._read(wait=True)
        return self._their_counts

    def _reclaim(self) -> None:
        """Take back the pieces whose messages were taken, which happens in the order of the sends."""
        if not self._under_way:
            return
        num_taken = self._known_counts().taken
        while self._num_free_again < num_taken:
            number = self._under_way.popleft()
            self._free[self._pieces[number].size].append(number)
            self._num_free_again += 1

    def _piece(self, size: int) -> tuple[int, int | None]:
        """The number of a piece that is free; and its descriptor, if the peer does not know it yet."""
        # Powers of two, so that messages of many sizes find one.
        capacity = 1 << (max(size, mmap.PAGESIZE) - 1).bit_length()
        if self._free[capacity]:
            return self._free[capacity].pop(), None
        descriptor = _new_memory(capacity)
        self._pieces.append(_Memory(descriptor, capacity))
        return len(self._pieces) - 1, descriptor

    def _tell(self, record: _Record, descriptor: int | None = None) -> None:
        """Send a record, with a descriptor that is not needed here any more."""
        try:
            if descriptor is None:
                self._connection.sendall(_RECORD.pack(*record))
            else:
                socket.send_fds(self._connection, [_RECORD.pack(*record)], [descriptor])
        except BlockingIOError:
            raise self._is_silent() from None
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._is_gone() from error
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _read(self, wait: bool) -> None:
        """Take note of what the peer has said; if nothing, wait until it does."""
        if wait:
            until = time.perf_counter() + _SPIN_S
            while not self._poll.poll(0) and time.perf_counter() < until:
                os.sched_yield()
        flags = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
        try:
            said, extra, _, _ = self._connection.recvmsg(_READ_BYTES, _DESCRIPTORS_BYTES, flags)
        except BlockingIOError:
            if wait:
                raise self._is_silent() from None
            return
        except ConnectionResetError:
            said, extra = b"", []
        self._has_ended = not said
        if wait and self._has_ended:
            raise self._is_gone()
        descriptors = (number for _, _, numbers in extra for (number,) in _DESCRIPTOR.iter_unpack(numbers))
        for record in map(_Record._make, _RECORD.iter_unpack(said)):
            self._note(record, descriptors)

    def _note(self, record: _Record, descriptors: Iterator[int]) -> None:
        if record.kind == _Kind.MESSAGE:
            self._arrived.append(record)
            return
        descriptor = next(descriptors)
        if record.kind == _Kind.COUNTS:
            self._their_counts = _Counts(descriptor)
        else:
            self._their_pieces[record.piece] = _Memory(descriptor, os.fstat(descriptor).st_size)
            self._arrived.append(record)
        os.close(descriptor)

    def _is_silent(self) -> PeerError:
        return PeerError(
            f"{self._peer} said nothing for {self._timeout_s:.0f} s. It hangs, or does something else: all ranks must "
            "call together what communicates."
        )

    def _is_gone(self) -> PeerError:
        return PeerError(f"{self._peer} is gone: its process has ended. Its own error says why.")


def _new_memory(size: int) -> int:
    """The descriptor of memory that has no name, and goes with the last process that maps it."""
    descriptor = os.memfd_create("hybridpp")
    os.ftruncate(descriptor, size)
    return descriptor


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
