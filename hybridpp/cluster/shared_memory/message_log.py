"""The message log of an arena: counts on its first page, and a paged list of its messages.

The list grows as needed, so a send never waits for the peer, however many messages it has not read. The processor must
keep writes in order, and reads, as x86 does: a message is written before its record, and the record before the count of
messages.
"""

import ctypes
from collections import deque
from enum import IntEnum
from typing import NamedTuple

from hybridpp.cluster.shared_memory.arena import PAGE_BYTES, Arena, Extent, PeerArena
from hybridpp.errors import PeerError

_NUM_WORDS = PAGE_BYTES // 8
_Words = ctypes.c_uint64 * _NUM_WORDS
# A record: a message's offset, and 2 * size + channel. The last record of a page is the next page's offset.
_RECORDS_PER_PAGE = _NUM_WORDS // 2 - 1
_NEXT_PAGE = _NUM_WORDS - 2
# Indices of the counts; requests are counted per channel.
_NUM_SENT, _NUM_TAKEN, _CLOSED, _NUM_ASKED = range(4)
# Bits of _CLOSED: the group was released; the process has left the job.
_RELEASED, _LEFT = 1, 2


class Channel(IntEnum):
    """Messages of one channel arrive in the order of the sends; the channels are independent.

    So a rank may take part in a collective before it receives earlier messages, as with gloo.
    """

    POINT_TO_POINT = 0
    COLLECTIVE = 1


class Message(NamedTuple):
    """A message of the peer.

    Attributes:
        number: number of earlier messages of both channels.
        address: its address in this process.
        size: bytes.
    """

    number: int
    address: int
    size: int


class Outbox:
    """Messages to the peer, and counts of those that this rank has requested from it and received.

    Attributes:
        arena: the memory that holds them.
        num_sent: messages so far.
    """

    def __init__(self) -> None:
        self.arena = Arena()
        self.num_sent = 0
        self._num_taken = 0
        # Messages that were taken before earlier ones were.
        self._taken_early: set[int] = set()
        self._counts = self._words(self.arena.allocate(PAGE_BYTES))
        self._page = self.arena.allocate(PAGE_BYTES)
        self._records, self._num_records = self._words(self._page), 0
        # With how many messages the peer has taken when it does not look at them any more.
        self._in_use: deque[tuple[int, Extent]] = deque()

    def add(self, source: int, size: int, channel: Channel) -> None:
        """Copy a message from an address, and publish it."""
        if self._num_records == _RECORDS_PER_PAGE:
            self._turn_page()
        extent = self.arena.allocate(size)
        ctypes.memmove(self.arena.address + extent.offset, source, size)
        at = 2 * self._num_records
        self._records[at], self._records[at + 1] = extent.offset, 2 * size + channel
        self._num_records += 1
        self.num_sent += 1
        self._in_use.append((self.num_sent, extent))
        self._counts[_NUM_SENT] = self.num_sent

    def free(self, num_taken: int) -> None:
        """Take back the pieces of as many messages."""
        while self._in_use and self._in_use[0][0] <= num_taken:
            self.arena.free(self._in_use.popleft()[1])

    def ask(self, channel: Channel) -> None:
        """Publish that this rank requests one more message."""
        self._counts[_NUM_ASKED + channel] += 1

    def take(self, message: Message) -> None:
        """Publish that this rank has copied a message of the peer, which may overwrite it."""
        self._taken_early.add(message.number)
        while self._num_taken in self._taken_early:
            self._taken_early.remove(self._num_taken)
            self._num_taken += 1
        self._counts[_NUM_TAKEN] = self._num_taken

    def end(self) -> None:
        """Publish that this end is closed in order."""
        self._counts[_CLOSED] |= _RELEASED

    def leave(self) -> None:
        """Publish that this process leaves the job in order."""
        self._counts[_CLOSED] |= _LEFT

    def close(self) -> None:
        """Release the memory. The peer's mapping stays valid."""
        self.arena.close()

    def _turn_page(self) -> None:
        page = self.arena.allocate(PAGE_BYTES)
        self._records[_NEXT_PAGE] = page.offset
        # The peer turns the page when it takes the next message.
        self._in_use.append((self.num_sent + 1, self._page))
        self._page, self._records, self._num_records = page, self._words(page), 0

    def _words(self, page: Extent) -> "ctypes.Array[ctypes.c_uint64]":
        return _Words.from_address(self.arena.address + page.offset)


class Inbox:
    """Messages of the peer, and counts of those that it has requested from this rank and received.

    Args:
        descriptor: of the peer's arena.
        peer: what errors call it.
    """

    def __init__(self, descriptor: int, peer: str):
        self._arena = PeerArena(descriptor, peer)
        self._peer = peer
        self._arrived: tuple[deque[Message], ...] = tuple(deque() for _ in Channel)
        self._num_arrived = 0
        # In the order in which an outbox allocates them.
        self._counts = _Words.from_address(self._arena.locate(0, PAGE_BYTES))
        self._records, self._num_read = _Words.from_address(self._arena.locate(PAGE_BYTES, PAGE_BYTES)), 0

    def has_message(self, channel: Channel) -> bool:
        """Whether an unread message of a channel is available."""
        arrived = self._arrived[channel]
        while not arrived and self._counts[_NUM_SENT] > self._num_arrived:
            self._read_record()
        return bool(arrived)

    def take(self, channel: Channel) -> Message:
        """The next message of a channel; valid until the outbox publishes that it was taken."""
        return self._arrived[channel].popleft()

    def _read_record(self) -> None:
        if self._num_read == _RECORDS_PER_PAGE:
            page = self._arena.locate(self._records[_NEXT_PAGE], PAGE_BYTES)
            self._records, self._num_read = _Words.from_address(page), 0
        at = 2 * self._num_read
        offset, (size, channel) = self._records[at], divmod(self._records[at + 1], 2)
        self._arrived[channel].append(Message(self._num_arrived, self._arena.locate(offset, size), size))
        self._num_read += 1
        self._num_arrived += 1

    def num_taken(self, num_sent: int) -> int:
        """The number of this rank's messages that the peer has received.

        Raises:
            PeerError: more than were sent.
        """
        taken = self._counts[_NUM_TAKEN]
        if taken > num_sent:
            raise PeerError(
                f"{self._peer} has taken {taken} messages of {num_sent}: its memory was overwritten. Find what in "
                "its process writes where it must not, or set HYBRIDPP_SHARED_MEMORY=0."
            )
        return taken

    def num_asked(self, channel: Channel) -> int:
        """The number of messages of a channel that the peer has requested."""
        return self._counts[_NUM_ASKED + channel]

    @property
    def is_closed(self) -> bool:
        """Whether the peer has closed its end, in order."""
        return bool(self._counts[_CLOSED] & _RELEASED)

    @property
    def has_left(self) -> bool:
        """Whether the peer's process has left the job in order."""
        return bool(self._counts[_CLOSED] & _LEFT)

    def close(self) -> None:
        """Release the memory."""
        self._arena.close()
