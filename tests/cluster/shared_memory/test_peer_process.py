"""Links to processes that are killed, stopped, forked, or flooded."""

import ctypes
import multiprocessing
import os
import random
import signal
import socket
import time
from contextlib import contextmanager

import pytest
import torch

from hybridpp.cluster.shared_memory.link import Link
from hybridpp.cluster.shared_memory.message_log import Channel
from hybridpp.cluster.shared_memory.socket_rendezvous import SocketRendezvous
from hybridpp.errors import PeerError

GONE = r"^rank 1 is gone: its process has ended\. It has reported no error: it was killed, .*"


@contextmanager
def peer(run):
    """This process's link to a forked one, which calls ``run`` with its own, and that process."""
    with SocketRendezvous() as meeting:
        process = multiprocessing.get_context("fork").Process(target=_peer, args=(meeting.address, run))
        process.start()
        link = None
        try:
            (connection,) = meeting.connect_all([meeting.address] * 2, 0, 60.0).values()
            link = Link(connection, "rank 1", 60.0)
            yield link, process
        finally:
            process.kill()
            process.join()
            process.close()
            if link is not None:
                link.close()


def _peer(address, run):
    torch.set_num_threads(1)
    with SocketRendezvous() as meeting:
        (connection,) = meeting.connect_all([address, meeting.address], 1, 60.0).values()
        link = Link(connection, "rank 0", 60.0)
        link.meet()
        run(link)


def received(link, size=1):
    tensor = torch.zeros(size)
    link.receive(tensor).wait()
    return tensor.tolist()


def assert_gone_soon(link):
    start = time.monotonic()
    with pytest.raises(PeerError, match=GONE):
        received(link)
    assert time.monotonic() - start < 30, "not after the time limit"


def sleep(link):
    link.send(torch.ones(1))
    time.sleep(60)


def test_a_killed_rank_is_gone_at_once():
    with peer(sleep) as (link, process):
        assert received(link) == [1.0]
        process.kill()
        assert_gone_soon(link)


def by_python():
    return os.fork()


def by_c():
    # No hook of Python's runs.
    return ctypes.CDLL(None).fork()


@pytest.mark.parametrize("fork", [by_python, by_c])
@pytest.mark.parametrize("end", [signal.SIGKILL, None])
def test_a_rank_that_ends_is_gone_at_once_though_its_forked_child_lives(fork, end):
    ours, theirs = multiprocessing.Pipe()

    def run(link):
        link.send(torch.ones(1))
        child = fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        theirs.send(child)
        if end is not None:
            time.sleep(60)

    with peer(run) as (link, process):
        child = ours.recv()
        try:
            assert received(link) == [1.0]
            if end is not None:
                os.kill(process.pid, end)
            assert_gone_soon(link)
            os.kill(child, 0)  # it lives
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_closed_link_is_closed_for_the_peer_though_a_forked_child_lives():
    ours, theirs = multiprocessing.Pipe()

    def run(link):
        child = by_c()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        link.close()
        theirs.send(child)
        time.sleep(60)

    with peer(run) as (link, _):
        child = ours.recv()
        try:
            with pytest.raises(PeerError, match=r"^rank 1 has closed its end of this group, and this rank has not\."):
                received(link)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_forked_child_cannot_use_its_parents_link_and_leaves_it_alone():
    ours, theirs = multiprocessing.Pipe()

    def run(link):
        own = len(os.listdir("/proc/self/fd"))
        child = os.fork()
        if child == 0:
            try:
                link.send(torch.zeros(1))
            except PeerError as error:
                theirs.send((str(error), len(os.listdir("/proc/self/fd")) - own))
            link.close()
            os._exit(0)
        os.waitpid(child, 0)
        link.send(torch.full((1,), 2.0))
        time.sleep(60)

    with peer(run) as (link, _):
        assert received(link) == [2.0]
        text, more_open = ours.recv()
        assert (
            text == "the connection to rank 0 belongs to the process that this one was forked from. Communicate there."
        )
        assert more_open <= -3, "the connection, the peer's process and the memory"


def test_a_message_that_was_half_written_is_not_received():
    def run(link):
        link.send(torch.ones(1))
        ctypes.memmove = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
        link.send(torch.full((1,), 2.0))

    with peer(run) as (link, _):
        assert received(link) == [1.0]
        assert_gone_soon(link)


@pytest.mark.parametrize("seed", range(4))
def test_a_rank_killed_at_any_time_leaves_whole_messages_in_order(seed):
    dice = random.Random(seed)
    sizes = [dice.choice([1, 7, 3000, 100_000]) for _ in range(100)]

    def run(link):
        for number in range(1_000_000):
            link.send(torch.full((sizes[number % 100],), float(number)))
            if number > 20:
                received(link)

    with peer(run) as (link, process):
        for number in range(20):
            link.receive(torch.zeros(sizes[number])).wait()
        until = time.monotonic() + dice.random() / 20

        def receive_and_kill():
            for number in range(20, 1_000_000):
                if time.monotonic() > until:
                    process.kill()
                tensor = torch.zeros(sizes[number % 100])
                link.receive(tensor).wait()
                assert tensor.unique().tolist() == [number]
                link.send(torch.zeros(1))

        with pytest.raises(PeerError, match=GONE):
            receive_and_kill()


def test_a_stopped_rank_is_silent_and_goes_on_when_it_may():
    def run(link):
        while True:
            link.send(torch.tensor(received(link)))

    with peer(run) as (link, process):
        link.send(torch.full((1,), 1.0))
        assert received(link) == [1.0]
        os.kill(process.pid, signal.SIGSTOP)
        for number in range(1000):
            link.send(torch.full((1,), float(number)))
        late = torch.zeros(1)
        link._timeout_s, patience_s = 1.0, link._timeout_s
        with pytest.raises(PeerError, match=r"^rank 1 sent nothing for 1 s\. It hangs, or runs other code"):
            link.receive(late).wait()
        link._timeout_s = patience_s
        os.kill(process.pid, signal.SIGCONT)
        link.take(Channel.POINT_TO_POINT)
        assert late.tolist() == [0.0]
        assert [received(link) for _ in range(999)] == [[float(number)] for number in range(1, 1000)]


def test_a_process_that_starts_others_does_not_hand_its_links_on():
    left, right = socket.socketpair()
    links = Link(left, "rank 1", 5.0), Link(right, "rank 0", 5.0)
    received = links[0]._process.greeting("rank 1")
    inherited = [fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_ours(fd) and os.get_inheritable(fd)]
    assert inherited == []
    os.close(received)
    for link in links:
        link.close()


def _is_ours(descriptor):
    try:
        target = os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:
        return False
    return "hybridpp" in target or target.startswith("socket:") or "pidfd" in target
