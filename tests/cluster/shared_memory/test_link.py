"""Both ends of a link in one process."""

import contextlib
import gc
import os
import resource
import socket
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hybridpp.cluster.shared_memory import arena
from hybridpp.cluster.shared_memory.link import Link
from hybridpp.errors import PartitionError, PeerError, ResourceError

NO_DESCRIPTORS = (
    r"^no descriptor left for memory that ranks of one host share: this process may have \d+ open\. Raise the limit "
    r"\(`ulimit -n`\), close what is not used, or set HYBRIDPP_SHARED_MEMORY=0\.$"
)


@pytest.fixture
def ends():
    left, right = socket.socketpair()
    links = Link(left, "rank 1", 0.2), Link(right, "rank 0", 0.2)
    yield links
    for link in links:
        link.close()


def carried(sender, receiver, tensor):
    received = torch.empty_like(tensor)
    sender.send(tensor)
    receiver.receive(received).wait()
    return received


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (1024,), (1025,), (700, 1001)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64])
def test_tensors_arrive_as_they_were(ends, shape, dtype):
    tensor = (torch.randn(shape) * 9).to(dtype)
    for sender, receiver in (ends, reversed(ends)):
        assert torch.equal(carried(sender, receiver, tensor), tensor)


def test_messages_arrive_in_send_order_whichever_side_starts_first(ends):
    left, right = ends
    early = [torch.empty(size) for size in (2, 3)]
    works = [right.receive(tensor) for tensor in early]
    for size in (2, 3, 4):
        tensor = torch.full((size,), float(size))
        left.send(tensor)
        tensor.zero_()  # what was sent is the sender's again
    late = torch.empty(4)
    right.receive(late).wait()
    works[1].wait()
    works[0].wait()
    assert [tensor.tolist() for tensor in (*early, late)] == [[float(size)] * size for size in (2, 3, 4)]


def test_both_may_send_first(ends):
    for number, link in enumerate(ends):
        link.send(torch.tensor([float(number)]))
    received = [torch.empty(1), torch.empty(1)]
    for link, tensor in zip(ends, received, strict=True):
        link.receive(tensor).wait()
    assert [tensor.item() for tensor in received] == [1.0, 0.0]


def test_memory_is_used_again_for_messages_of_like_size(ends):
    left, right = ends
    for size in (5000, 6000, 8000) * 10:
        carried(left, right, torch.zeros(size // 4))
    used = resident(left)
    assert used == 2 * 4096 + 8192, "two pages of its own, and a message"
    for _ in range(3):
        left.send(torch.zeros(2000))
    assert resident(left) == used + 2 * 8192
    for _ in range(3):
        right.receive(torch.empty(2000)).wait()
    for _ in range(10):
        carried(left, right, torch.zeros(2000))
    assert resident(left) == used + 2 * 8192


def test_a_message_is_sent_when_it_was_asked_for(ends):
    left, right = ends
    first, second = left.send(torch.zeros(1)), left.send(torch.zeros(1))
    right.receive(torch.empty(1))
    first.wait()
    with pytest.raises(PeerError, match=r"^rank 1 sent nothing for 0 s\. It hangs, or runs other code: what"):
        second.wait()


@pytest.mark.parametrize(("count", "size"), [(5000, 1), (40, 300_000)])
def test_both_may_run_far_ahead_before_either_reads(ends, count, size):
    for number in range(count):
        for link in ends:
            link.send(torch.full((size,), float(number)))
    received = torch.empty(size)
    for link in ends:
        for number in range(count):
            link.receive(received).wait()
            assert received[0] == received[-1] == number
    assert max(map(resident, ends)) <= 2**26 + 25 * 2**20, "of memory that is not in use, so much is kept"


def test_a_large_message_does_not_keep_its_memory(ends, monkeypatch):
    monkeypatch.setattr(arena, "_CACHE_BYTES", 2**20)
    left, right = ends
    carried(left, right, torch.zeros(2**20))
    assert resident(left) > 2**22
    carried(left, right, torch.zeros(1))
    assert resident(left) < 2**16
    num_open = num_descriptors()
    for size in (10, 10_000, 100_000):
        carried(left, right, torch.zeros(size))
    assert num_descriptors() == num_open, "no message costs a descriptor"


def test_tensors_without_numbers_are_refused_before_they_crash(ends):
    with FakeTensorMode():
        fake = torch.zeros(3)
    for tensor in (fake, torch.zeros(3, device="meta")):
        for act in (ends[0].send, ends[0].receive):
            with pytest.raises(PartitionError, match=r"^a tensor without data cannot be communicated: got a "):
                act(tensor)


def test_who_asked_and_ended_has_asked(ends):
    link, peer = ends
    sendings = [link.send(torch.zeros(1)) for _ in range(2)]
    peer.receive(torch.zeros(1)).wait()
    peer.close()
    sendings[0].wait()
    with pytest.raises(
        PeerError, match=r"^rank 1 has closed its end of this group, and this rank has not\. All ranks "
    ):
        sendings[1].wait()


def test_a_message_of_another_size_is_named_on_the_rank_that_gets_it(ends):
    left, right = ends
    left.send(torch.zeros(3))
    with pytest.raises(
        PeerError, match=r"^rank 0 sent 12 bytes for a tensor of 16 \(\(2, 2\), torch\.float32\): the ranks do not do"
    ):
        right.receive(torch.zeros(2, 2)).wait()


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (
            lambda sockets, peer: sockets[1].close(),
            r"^rank 1 is gone: its process has ended\. It has reported no error: it was killed, .*",
        ),
        (lambda sockets, peer: peer.close(), r"^rank 1 has closed its end of this group, and this rank has not\. All "),
    ],
)
def test_what_a_peer_sent_before_it_ended_arrives_and_nothing_else(end, text):
    sockets = socket.socketpair()
    link, peer = Link(sockets[0], "rank 1", 5.0), Link(sockets[1], "rank 0", 5.0)
    sending = link.send(torch.zeros(1))
    peer.send(torch.ones(1))
    end(sockets, peer)
    last = torch.zeros(1)
    link.receive(last).wait()
    assert last.item() == 1.0
    for act in (sending.wait, link.receive(torch.zeros(1)).wait, lambda: link.send(torch.zeros(1))):
        with pytest.raises(PeerError, match=text):
            act()
    link.close()
    peer.close()


def test_a_message_that_comes_together_with_the_end_of_its_sender_arrives(ends, monkeypatch):
    link, peer = ends
    link.meet()
    peer.send(torch.ones(1))
    peer.close()
    while not link._process.has_ended:
        link._process.sleep(0.1)
    monkeypatch.setattr(link._spinning, "until", lambda is_ready: False)
    received = torch.zeros(1)
    link.receive(received).wait()
    assert received.item() == 1.0


def test_closing_gives_back_descriptors_and_memory_and_loses_no_message():
    before = num_descriptors(), num_mapped()
    sockets = socket.socketpair()
    left, right = Link(sockets[0], "rank 1", 5.0), Link(sockets[1], "rank 0", 5.0)
    for link, peer in ((left, right), (right, left)):
        carried(link, peer, torch.zeros(70_000))
    received = torch.zeros(3)
    works = [left.send(torch.ones(3)), left.receive(torch.zeros(3))]
    left.close()
    left.close()
    right.receive(received).wait()
    assert received.tolist() == [1.0] * 3
    for act in (lambda: left.send(received), lambda: left.receive(received), *(work.wait for work in works)):
        with pytest.raises(PeerError, match=r"^the connection to rank 1 is closed: its group was released\. "):
            act()
    right.close()
    assert (num_descriptors(), num_mapped()) == before


def test_a_link_that_is_dropped_is_closed_without_a_warning():
    gc.collect()  # what other tests have left
    before = num_descriptors(), num_mapped()
    sockets = socket.socketpair()
    left, right = Link(sockets[0], "rank 1", 5.0), Link(sockets[1], "rank 0", 5.0)
    carried(left, right, torch.zeros(10))
    del sockets
    # A warning of an unclosed socket is an error in these tests.
    del left
    gc.collect()
    with pytest.raises(PeerError, match=r"^rank 1 is gone|^rank 0 is gone"):
        right.receive(torch.zeros(1)).wait()
    del right
    gc.collect()
    assert (num_descriptors(), num_mapped()) == before


def test_whoever_meets_nobody_in_the_time_it_has_says_how_long_that_was():
    ours, theirs = socket.socketpair()
    link = Link(ours, "rank 1", 600.0)
    with pytest.raises(PeerError, match=r"^rank 1 sent nothing for 0 s\."):
        link.meet(0.05)
    link.close()
    theirs.close()


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (b"hybr", r"^rank 1 did not greet as a rank does\. Start all ranks with one version of hybridpp\.$"),
        (b"hybridpp", r"^rank 1 did not greet as a rank does\."),
        (b"", r"^rank 1 sent nothing for 0 s\."),
    ],
)
def test_a_peer_that_does_not_greet_as_a_rank_does_is_refused(said, text):
    ours, theirs = socket.socketpair()
    link = Link(ours, "rank 1", 0.2)
    theirs.sendall(said)
    with pytest.raises(PeerError, match=text):
        link.receive(torch.zeros(1)).wait()
    link.close()
    theirs.close()


def test_descriptors_that_a_greeting_brings_too_many_are_closed():
    ours, theirs = socket.socketpair()
    link = Link(ours, "rank 1", 0.2)
    before = num_descriptors()
    socket.send_fds(theirs, [b"hybridpp"], [0, 0, 0])
    with pytest.raises(PeerError, match=r"^rank 1 did not greet as a rank does\."):
        link.meet()
    assert num_descriptors() == before
    link.close()
    theirs.close()


def test_memory_that_a_greeting_brings_is_checked():
    ours, theirs = socket.socketpair()
    link = Link(ours, "rank 1", 0.2)
    before = num_descriptors()
    socket.send_fds(theirs, [b"hybridpp"], [0])
    with pytest.raises(PeerError, match=r"^rank 1 sent no memory to share\."):
        link.meet()
    assert num_descriptors() == before
    link.close()
    theirs.close()


@pytest.mark.parametrize("spare", range(4))
def test_without_descriptors_the_error_names_the_limit_and_the_way_out(spare):
    sockets = socket.socketpair()
    right = Link(sockets[1], "rank 0", 0.2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 1
    fillers = [os.dup(0) for _ in range(limit - num_descriptors())]
    open_ones = num_descriptors()
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + spare, hard))
    try:
        # One for the process, one for the memory, and for a moment one for the peer's memory.
        context = contextlib.nullcontext() if spare >= 3 else pytest.raises(ResourceError, match=NO_DESCRIPTORS)
        with context:
            link = Link(sockets[0], "rank 1", 0.2)
            link.meet()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in fillers:
            os.close(descriptor)
    if spare >= 2:
        link.close()
    right.close()
    assert sockets[0].fileno() == -1
    assert num_descriptors() == open_ones - len(fillers) - 4


def resident(link):
    """Bytes that the system has given for what a link sends."""
    return os.fstat(link._outbox.arena.descriptor).st_blocks * 512


def num_descriptors():
    return len(os.listdir("/proc/self/fd"))


def num_mapped():
    return Path("/proc/self/maps").read_text().count("memfd:hybridpp")
