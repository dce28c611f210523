"""Ranks that meet, in threads of one process; and whoever else calls."""

import os
import resource
import select
import socket
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from hybridpp.cluster.shared_memory import socket_rendezvous as module
from hybridpp.cluster.shared_memory.socket_rendezvous import SocketRendezvous
from hybridpp.errors import PeerError


@dataclass
class Ranks:
    """Threads that meet."""

    meetings: list[SocketRendezvous]
    timeout_s: float = 60.0
    met: dict[int, dict[int, socket.socket]] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)

    def run(self, ranks=None):
        addresses = [meeting.address for meeting in self.meetings]

        def connect_all(rank):
            try:
                self.met[rank] = self.meetings[rank].connect_all(addresses, rank, self.timeout_s)
            except Exception as error:
                self.errors[rank] = error

        threads = [
            threading.Thread(target=connect_all, args=(rank,))
            for rank in (range(len(addresses)) if ranks is None else ranks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
            assert not thread.is_alive()

    def assert_connected(self):
        assert not self.errors
        for rank, connections in self.met.items():
            assert sorted(connections) == [peer for peer in range(len(self.meetings)) if peer != rank]
            for peer, connection in connections.items():
                connection.send(bytes([rank]))
                other = self.met[peer][rank]
                other.settimeout(60)
                assert other.recv(2) == bytes([rank])


@pytest.fixture
def resources():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def make(resources):
    def ranks(size, **settings):
        made = Ranks([resources.enter_context(SocketRendezvous()) for _ in range(size)], **settings)
        resources.callback(lambda: [each.close() for met in made.met.values() for each in met.values()])
        return made

    return ranks


@pytest.fixture
def stranger(resources):
    """A caller who says something, or nothing."""

    def call(meeting, said=b""):
        connection = resources.enter_context(socket.socket(socket.AF_UNIX))
        connection.settimeout(60)
        connection.connect(meeting.address.name)
        connection.sendall(said)
        return connection

    return call


def heard(connection):
    try:
        return connection.recv(1)
    except ConnectionResetError:  # closed with something unread
        return b""


def was_turned_away(connection):
    return heard(connection) == b""


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_every_rank_is_connected_to_every_other(make, size):
    ranks = make(size)
    ranks.run()
    ranks.assert_connected()


def test_silent_and_wrong_callers_hold_nobody_up(make, stranger):
    ranks = make(3)
    first = ranks.meetings[0]
    token = first.address.token
    wrong = [bytes(16) + b"\1", bytes(17), bytes(range(17)), token + b"\0", token + b"\7", token[:15] + b"xx"]
    silent = [stranger(first), stranger(first, token[:5]), stranger(first, token)]
    strangers = [stranger(first, said) for said in wrong]
    stranger(first, b"gone").close()
    start = time.monotonic()
    ranks.run()
    assert time.monotonic() - start < 30
    ranks.assert_connected()
    assert all(map(was_turned_away, strangers))
    first.close()
    assert all(was_turned_away(each) for each in silent)


def test_a_rank_that_calls_twice_is_heard_once(make, stranger):
    ranks = make(2)
    first = ranks.meetings[0]
    twins = [stranger(first, first.address.token + b"\1") for _ in range(2)]
    met = first.connect_all([meeting.address for meeting in ranks.meetings], 0, 60.0)
    first.close()
    # The second stays unanswered, or is closed.
    met[1].sendall(b"1")
    assert sorted(map(heard, twins)) == [b"", b"1"]
    met[1].close()


def test_more_silent_callers_than_are_kept_take_no_more_descriptors(make, stranger, monkeypatch):
    monkeypatch.setattr(module, "_MAX_CALLERS", 5)
    ranks = make(2)
    silent = [stranger(ranks.meetings[0]) for _ in range(30)]
    ranks.run()
    ranks.assert_connected()
    poll = select.poll()
    for each in silent:
        poll.register(each, select.POLLIN)
    assert len(poll.poll(0)) >= 25


def test_callers_of_another_user_are_not_even_listened_to(make, stranger, monkeypatch):
    ranks = make(2)
    own = module.peer_uid
    strangers = [stranger(ranks.meetings[0], ranks.meetings[0].address.token + b"\1") for _ in range(3)]
    turn = iter([os.geteuid() + 1] * 3)
    monkeypatch.setattr(module, "peer_uid", lambda connection: next(turn, None) or own(connection))
    ranks.run()
    ranks.assert_connected()
    assert all(map(was_turned_away, strangers))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_process_of_another_user_is_recognised(make):
    ranks = make(2)
    first = ranks.meetings[0]
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(60)
                connection.connect(first.address.name)
                connection.sendall(first.address.token + b"\1")
                os.write(tell, b"called")
                os.write(tell, heard(connection) or b"away")
        finally:
            os._exit(0)
    os.close(tell)
    assert os.read(told, 6) == b"called"
    ranks.run()
    ranks.assert_connected()
    assert os.read(told, 4) == b"away"
    os.waitpid(child, 0)
    os.close(told)


def test_a_full_queue_of_callers_is_emptied_and_the_ranks_get_through(make, stranger):
    ranks = make(3)
    for meeting in ranks.meetings:
        meeting._listener.listen(2)
    for meeting in ranks.meetings:
        for _ in range(3):
            stranger(meeting)
    with socket.socket(socket.AF_UNIX) as late:
        late.setblocking(False)
        with pytest.raises(BlockingIOError):
            late.connect(ranks.meetings[0].address.name)
    ranks.run()
    ranks.assert_connected()


def test_strangers_who_never_stop_calling_hold_nobody_up(make):
    ranks = make(3)
    ranks.meetings[0]._listener.listen(1)
    stop = threading.Event()

    def call_again_and_again():
        while not stop.is_set():
            with socket.socket(socket.AF_UNIX) as connection:
                connection.setblocking(False)
                try:
                    connection.connect(ranks.meetings[0].address.name)
                except OSError:
                    time.sleep(1e-4)

    flood = threading.Thread(target=call_again_and_again)
    flood.start()
    try:
        ranks.run()
    finally:
        stop.set()
        flood.join()
    ranks.assert_connected()


def test_a_rank_that_never_calls_is_named_after_a_while(make):
    ranks = make(3, timeout_s=2.0)
    ranks.run(ranks=[0, 1])
    for rank in (0, 1):
        assert str(ranks.errors[rank]) == "ranks [2] of the group were not reached in 2 s."
    ranks.meetings[0].close()


def test_a_rank_that_has_given_up_is_named_at_once(make):
    ranks = make(2)
    ranks.meetings[0].close()
    ranks.run(ranks=[1])
    assert isinstance(ranks.errors[1], PeerError)
    assert str(ranks.errors[1]) == "a rank of this host does not listen for the others: it failed, or has given up."


def test_whoever_failed_to_meet_leaves_nothing_open(make, stranger):
    before = len(os.listdir("/proc/self/fd"))
    ranks = Ranks([SocketRendezvous(), SocketRendezvous(), SocketRendezvous()], timeout_s=2.0)
    callers = [stranger(ranks.meetings[0]) for _ in range(3)]
    ranks.run(ranks=[0, 2])
    assert ranks.errors.keys() == {0}
    for connection in ranks.met[2].values():
        connection.close()
    for meeting in ranks.meetings:
        meeting.close()
    for caller in callers:
        caller.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_descriptors_the_system_error_is_passed_on(make, stranger):
    ranks = make(2)
    stranger(ranks.meetings[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            SocketRendezvous()
        with pytest.raises(OSError, match="Too many open files"):
            ranks.meetings[0].connect_all([meeting.address for meeting in ranks.meetings], 0, 60.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_ranks_whose_host_has_no_readable_boot_id_share_nothing(monkeypatch):
    assert module._host() == module._host()

    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(module, "open", refuse, raising=False)
    assert module._host() != module._host()
