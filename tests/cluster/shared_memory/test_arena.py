"""Memory for messages: what is used again, what is given back, and what cannot be taken from under a reader."""

import errno
import itertools
import os
import resource
import socket
from contextlib import ExitStack

import pytest

from hybridpp.cluster.shared_memory import arena as module
from hybridpp.cluster.shared_memory.arena import ARENA_BYTES, PAGE_BYTES, Arena, PeerArena
from hybridpp.cluster.shared_memory.linux import has_fixed_size
from hybridpp.errors import PeerError, ResourceError

MIB = 2**20


@pytest.fixture
def arena():
    made = Arena()
    yield made
    made.close()


def resident(arena):
    """Bytes that the system has given for it."""
    return os.fstat(arena.descriptor).st_blocks * 512


def test_pieces_are_used_again_and_never_overlap(arena):
    sizes = [0, 1, PAGE_BYTES, PAGE_BYTES + 1, 5 * PAGE_BYTES, 7 * PAGE_BYTES]
    for _ in range(3):
        pieces = [arena.allocate(size) for size in sizes]
        spans = sorted((piece.offset, piece.offset + piece.capacity) for piece in pieces)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert all(size <= piece.backed <= piece.capacity for size, piece in zip(sizes, pieces, strict=True) if size)
        for piece in pieces:
            arena.free(piece)
    assert resident(arena) == sum(max(piece.backed, 0) for piece in pieces)
    assert max(end for _, end in spans) == sum(piece.capacity for piece in pieces)


def test_a_larger_message_in_a_used_piece_gets_the_memory_that_is_missing(arena):
    small = arena.allocate(PAGE_BYTES + 1)
    arena.free(small)
    large = arena.allocate(2 * PAGE_BYTES)
    assert (large.offset, large.backed) == (small.offset, 2 * PAGE_BYTES)
    assert resident(arena) == 2 * PAGE_BYTES


def test_memory_of_large_messages_is_given_back(arena, monkeypatch):
    monkeypatch.setattr(module, "_CACHE_BYTES", 4 * MIB)
    small, large = arena.allocate(MIB), arena.allocate(32 * MIB)
    assert resident(arena) == 33 * MIB
    arena.free(large)
    assert resident(arena) == MIB
    arena.free(small)
    assert resident(arena) == MIB
    # What was given back comes again; of what is kept, the longest unused goes.
    assert arena.allocate(32 * MIB) is large
    pieces = [arena.allocate(size * MIB) for size in (1, 2, 2)]
    for piece in pieces:
        arena.free(piece)
    assert [piece.backed for piece in pieces] == [0, 2 * MIB, 2 * MIB]


def test_pieces_of_empty_messages_have_no_memory_to_give_back(arena, monkeypatch):
    monkeypatch.setattr(module, "_CACHE_BYTES", MIB)
    pieces = [arena.allocate(size) for size in (0, MIB, 0, MIB)]
    for piece in pieces:
        arena.free(piece)
    assert resident(arena) == MIB


def test_memory_is_asked_for_in_steps_that_a_signal_may_interrupt(arena, monkeypatch):
    asked, allocate = [], os.posix_fallocate

    def noted(descriptor, start, size):
        asked.append(size)
        allocate(descriptor, start, size)

    monkeypatch.setattr(os, "posix_fallocate", noted)
    assert arena.allocate(9 * MIB).backed == 9 * MIB
    assert asked == [4 * MIB, 4 * MIB, MIB]


def test_without_memory_the_error_says_how_much_and_the_way_out(arena, monkeypatch):
    allocate = os.posix_fallocate

    def full(descriptor, start, size):
        if start >= PAGE_BYTES + 4 * MIB:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(descriptor, start, size)

    kept = arena.allocate(PAGE_BYTES)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        text = (
            rf"^no memory for a message of {8 * MIB} bytes to another rank of this host: No space left on device\. "
            rf"Messages not received yet and free pieces take up to {8 * MIB + PAGE_BYTES} bytes\. Free memory, raise "
            r"the limit of the container, or set HYBRIDPP_SHARED_MEMORY=0\.$"
        )
        for _ in range(3):
            with pytest.raises(ResourceError, match=text):
                arena.allocate(8 * MIB)
            assert resident(arena) == 4 * MIB + PAGE_BYTES
        arena.free(kept)
        assert arena.allocate(1) is kept
    assert arena.allocate(8 * MIB).backed == 8 * MIB


def test_what_does_not_fit_is_refused(arena):
    text = (
        rf"^a message of up to {ARENA_BYTES} bytes .* does not fit beside {PAGE_BYTES} bytes of others: {ARENA_BYTES}"
    )
    arena.allocate(1)
    with pytest.raises(ResourceError, match=text):
        arena.allocate(ARENA_BYTES)


def test_no_peer_can_change_the_size_of_an_arena(arena):
    assert has_fixed_size(arena.descriptor)
    for size in (0, PAGE_BYTES, 2 * ARENA_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.descriptor, size)


def test_memory_that_could_vanish_under_its_reader_is_refused(tmp_path):
    with ExitStack() as resources:
        unsealed, small = (os.memfd_create(name, os.MFD_ALLOW_SEALING) for name in ("unsealed", "small"))
        os.ftruncate(unsealed, ARENA_BYTES)
        other, _ = sockets = socket.socketpair()
        file = resources.enter_context(open(tmp_path / "file", "w+b"))
        for each in sockets:
            resources.callback(each.close)
        for descriptor in (unsealed, small):
            resources.callback(os.close, descriptor)
        for descriptor in (unsealed, small, file.fileno(), other.fileno()):
            with pytest.raises(PeerError, match=r"^rank 1 sent no memory to share\. Start all ranks with one version"):
                PeerArena(descriptor, "rank 1")


def test_what_lies_outside_of_an_arena_is_not_read(arena):
    theirs = PeerArena(arena.descriptor, "rank 1")
    assert theirs.locate(ARENA_BYTES - 1, 1) == theirs.address + ARENA_BYTES - 1
    for offset, size in [(ARENA_BYTES - 1, 2), (0, ARENA_BYTES + 1), (2**64 - 1, 2**64 - 1)]:
        with pytest.raises(
            PeerError, match=rf"^rank 1 says that {size} bytes lie at {offset} of {ARENA_BYTES}: its mem"
        ):
            theirs.locate(offset, size)
    theirs.close()


def test_what_failed_to_be_made_leaves_nothing_open():
    before = os.listdir("/proc/self/fd")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (ARENA_BYTES, hard))
    try:
        with pytest.raises(OSError, match="Cannot allocate memory"):
            Arena()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert os.listdir("/proc/self/fd") == before
