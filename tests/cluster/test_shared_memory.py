"""Both ends of a link in one process."""

import socket

import pytest
import torch

from hybridpp.cluster.shared_memory import Link
from hybridpp.errors import PeerError


@pytest.fixture
def ends():
    left, right = socket.socketpair()
    yield Link(left, "rank 1", 0.2), Link(right, "rank 0", 0.2)
    left.close()
    right.close()


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


def test_messages_arrive_in_the_order_they_were_sent_whoever_asks_or_waits_first(ends):
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
    assert [piece.size for piece in left._pieces] == [8192]
    for _ in range(3):
        left.send(torch.zeros(2000))
    assert len(left._pieces) == 3
    for _ in range(3):
        right.receive(torch.empty(2000)).wait()
    for _ in range(10):
        carried(left, right, torch.zeros(2000))
    assert len(left._pieces) == 3


def test_a_message_is_sent_when_it_was_asked_for(ends):
    left, right = ends
    first, second = left.send(torch.zeros(1)), left.send(torch.zeros(1))
    right.receive(torch.empty(1))
    first.wait()
    with pytest.raises(PeerError, match=r"^rank 1 said nothing for 0 s\. It hangs, or does something else: all ranks"):
        second.wait()


def test_a_rank_may_run_far_ahead_of_one_that_reads_at_last(ends):
    left, right = ends
    for number in range(200):
        left.send(torch.tensor(float(number)))
    received = torch.empty(200)
    for part in received:
        right.receive(part).wait()
    assert received.tolist() == list(range(200))
    assert len(left._pieces) == 200


def test_a_peer_that_never_reads_is_named(ends):
    left, _ = ends

    def run_ahead():
        for _ in range(5000):
            left.send(torch.empty(1))

    with pytest.raises(PeerError, match=r"^rank 1 said nothing for 0 s\."):
        run_ahead()


def test_who_asked_and_ended_has_asked():
    left, right = socket.socketpair()
    link, peer = Link(left, "rank 1", 5.0), Link(right, "rank 0", 5.0)
    sendings = [link.send(torch.zeros(1)) for _ in range(2)]
    peer.receive(torch.zeros(1)).wait()
    right.close()
    sendings[0].wait()
    with pytest.raises(PeerError, match=r"^rank 1 is gone"):
        sendings[1].wait()
    left.close()


def test_a_message_of_another_size_is_named_on_the_rank_that_gets_it(ends):
    left, right = ends
    left.send(torch.zeros(3))
    with pytest.raises(
        PeerError, match=r"^rank 0 sent 12 bytes for a tensor of 16 \(\(2, 2\), torch\.float32\): the ranks do not do"
    ):
        right.receive(torch.zeros(2, 2)).wait()


def test_a_peer_that_ends_is_gone_for_who_waits_or_sends():
    left, right = socket.socketpair()
    link, peer = Link(left, "rank 1", 5.0), Link(right, "rank 0", 5.0)
    sending = link.send(torch.zeros(1))
    peer.send(torch.ones(1))
    right.close()
    del peer
    last = torch.zeros(1)
    link.receive(last).wait()
    assert last.item() == 1.0, "what it sent before is still there"
    gone = r"^rank 1 is gone: its process has ended\. Its own error says why\.$"
    for act in (sending.wait, link.receive(torch.zeros(1)).wait, lambda: link.send(torch.zeros(1))):
        with pytest.raises(PeerError, match=gone):
            act()
    left.close()
