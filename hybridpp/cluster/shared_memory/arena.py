"""Shared memory that holds a rank's messages to one peer."""

import errno
import mmap
import os
import weakref
from collections import OrderedDict, defaultdict

from hybridpp.cluster.shared_memory.linux import has_fixed_size, map_memory, new_memory, punch_hole, unmap_memory
from hybridpp.errors import PeerError, ResourceError

PAGE_BYTES = mmap.PAGESIZE
# Reserved addresses, not memory: an arena never grows or moves, and a peer can validate an offset by arithmetic.
ARENA_BYTES = 2**36
# Memory of free extents that is kept; the rest is returned to the system. Enough for a pipeline's activations.
_CACHE_BYTES = 2**26
# Memory is asked for in steps of a millisecond.
_STEP_BYTES = 2**22


class Extent:
    """An extent of an arena, for one message.

    Attributes:
        offset: where it starts.
        capacity: bytes up to the next one.
        backed: bytes, from its start, that have memory.
    """

    __slots__ = ("backed", "capacity", "offset")

    def __init__(self, offset: int, capacity: int):
        self.offset, self.capacity, self.backed = offset, capacity, 0


class Arena:
    """Memory that is handed out in pieces and taken back.

    Sizes of pieces are powers of two. Each size has its own, which are used again, the last one first.

    Attributes:
        descriptor: of the memory, for the peer.
        address: where it starts.
    """

    def __init__(self) -> None:
        self.descriptor = new_memory(ARENA_BYTES)
        try:
            self.address = map_memory(self.descriptor, ARENA_BYTES, writable=True)
        except OSError:
            os.close(self.descriptor)
            raise
        self.close = weakref.finalize(self, _give_back, self.descriptor, self.address)
        self._end = 0
        self._free: defaultdict[int, list[Extent]] = defaultdict(list)
        # Free extents with memory, in the order of their return.
        self._cached: OrderedDict[int, Extent] = OrderedDict()
        self._cached_bytes = 0

    def allocate(self, size: int) -> Extent:
        """Allocate an extent of at least ``size`` bytes, backed by memory.

        Raises:
            ResourceError: there is no more memory.
        """
        capacity = 1 << (max(size, PAGE_BYTES) - 1).bit_length()
        free = self._free[capacity]
        extent = free.pop() if free else self._new_extent(capacity)
        if self._cached.pop(extent.offset, None) is not None:
            self._cached_bytes -= extent.backed
        try:
            self._back(extent, size)
        except ResourceError:
            self.free(extent)
            raise
        return extent

    def free(self, extent: Extent) -> None:
        """Free an extent that the peer no longer reads."""
        self._free[extent.capacity].append(extent)
        if extent.backed:
            self._cached[extent.offset] = extent
            self._cached_bytes += extent.backed
        while self._cached_bytes > _CACHE_BYTES:
            _, oldest = self._cached.popitem(last=False)
            punch_hole(self.descriptor, oldest.offset, oldest.backed)
            self._cached_bytes -= oldest.backed
            oldest.backed = 0

    def _new_extent(self, capacity: int) -> Extent:
        if self._end + capacity > ARENA_BYTES:
            raise ResourceError(
                f"a message of up to {capacity} bytes to another rank of this host does not fit beside {self._end} "
                f"bytes of others: {ARENA_BYTES} are the most. Send less before the peer receives, or set "
                "HYBRIDPP_SHARED_MEMORY=0."
            )
        extent = Extent(self._end, capacity)
        self._end += capacity
        return extent

    def _back(self, extent: Extent, size: int) -> None:
        """Allocate memory now: a failure on the first write would end the process."""
        wanted = -(-size // PAGE_BYTES) * PAGE_BYTES
        try:
            while extent.backed < wanted:
                # A signal aborts an unfinished request, so with a profiler's timer a large one might never finish.
                step = min(wanted - extent.backed, _STEP_BYTES)
                os.posix_fallocate(self.descriptor, extent.offset + extent.backed, step)
                extent.backed += step
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise ResourceError(
                f"no memory for a message of {size} bytes to another rank of this host: {error.strerror}. Messages "
                f"not received yet and free pieces take up to {self._end} bytes. Free memory, raise the limit of the "
                "container, or set HYBRIDPP_SHARED_MEMORY=0."
            ) from error


def _give_back(descriptor: int, address: int) -> None:
    os.close(descriptor)
    unmap_memory(address, ARENA_BYTES)


class PeerArena:
    """The peer's arena, mapped read-only.

    Args:
        descriptor: as the peer sent it; may be closed afterwards.
        peer: what errors call it.

    Attributes:
        address: where it starts.

    Raises:
        PeerError: it is no arena.
    """

    def __init__(self, descriptor: int, peer: str):
        if not has_fixed_size(descriptor) or os.fstat(descriptor).st_size != ARENA_BYTES:
            raise PeerError(f"{peer} sent no memory to share. Start all ranks with one version of hybridpp.")
        self._peer = peer
        self.address = map_memory(descriptor, ARENA_BYTES, writable=False)
        self.close = weakref.finalize(self, unmap_memory, self.address, ARENA_BYTES)

    def locate(self, offset: int, size: int) -> int:
        """The address of a message, given the offset and size that the peer wrote.

        Raises:
            PeerError: it is outside of the arena.
        """
        if offset + size > ARENA_BYTES:
            raise PeerError(
                f"{self._peer} says that {size} bytes lie at {offset} of {ARENA_BYTES}: its memory was overwritten. "
                "Find what in its process writes where it must not, or set HYBRIDPP_SHARED_MEMORY=0."
            )
        return self.address + offset
