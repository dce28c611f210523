import gc
import json
import logging
import re
import socket
import threading
import time
from datetime import timedelta

import pytest
from processes import free_port
from torch.distributed import HashStore, TCPStore

from hybridpp.cluster import rendezvous
from hybridpp.cluster.rank_process import RankProcess
from hybridpp.cluster.rendezvous import Entry, StoreAddress, list_ranks, wait_for_ranks
from hybridpp.errors import LaunchError


@pytest.fixture
def port():
    return free_port()


def settings(**changes):
    return {"seed": 1, "timeout_s": 5.0, **changes}


@pytest.fixture(autouse=True)
def no_store_is_left():
    """A process that is forked while a store's thread runs has the store, and not the thread."""
    yield
    gc.collect()


def on_threads(*calls):
    """What each call gives, or the text of its error, all of them at once."""
    results = [None] * len(calls)

    def work(place):
        try:
            results[place] = calls[place]()
        except LaunchError as error:
            # Without what else the error knows, which is the store.
            results[place] = str(error)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    return results


def joining(address, rank, size, timeout_s=60.0, **changes):
    return lambda: wait_for_ranks(address, rank, size, Entry(settings=settings(**changes)), timeout_s)[0]


def refused(results, text):
    for result in results:
        assert re.match(text, result), result


def test_all_ranks_get_one_store(port):
    address = StoreAddress("127.0.0.1", port)
    stores = on_threads(*(joining(address, rank, 3) for rank in range(3)))
    stores[2].set("x", "1")
    assert [store.get("x") for store in stores] == [b"1"] * 3


def test_a_second_attempt_finds_nothing_of_the_first(port):
    server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    address = StoreAddress("127.0.0.1", port, is_external=True)
    for first in (1, 0):
        calls = [joining(address, rank, 2) for rank in (0, 1)]
        late = calls[1 - first]

        def after_a_while(call=late):
            time.sleep(0.05)
            return call()

        calls[1 - first] = after_a_while
        stores = on_threads(*calls)
        assert not stores[1].check(["x"])
        stores[0].set("x", str(first))
        assert stores[1].get("x") == str(first).encode()
    del server


def test_a_store_that_ends_meanwhile_is_sought_again(port):
    server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    kept = [server]
    del server

    def replaced():
        time.sleep(0.1)
        kept.clear()
        return joining(StoreAddress("127.0.0.1", port), 0, 2)()

    stores = on_threads(replaced, joining(StoreAddress("127.0.0.1", port), 1, 2))
    stores[1].set("x", "1")
    assert stores[0].get("x") == b"1"


def test_ranks_that_do_not_come_are_named_on_every_rank(port):
    address = StoreAddress("127.0.0.1", port)
    text = r"ranks 1, 3 did not call launch within 3 s; 2 of 4 ranks did\. .* raise timeout_s of launch_from_torch"
    refused(on_threads(*(joining(address, rank, 4, timeout_s=3.0) for rank in (0, 2))), text)


def test_a_rank_0_that_does_not_come_is_named(port, monkeypatch):
    monkeypatch.setattr(rendezvous, "_GRACE_S", 0.0)
    text = rf"rank 1 could not reach 127\.0\.0\.1:{port} within 0\.3 s: .* Check that rank 0 runs"
    refused(on_threads(joining(StoreAddress("127.0.0.1", port), 1, 2, timeout_s=0.3)), text)
    server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    text = r"rank 0 did not call launch within 1 s, or does not answer\."
    refused(on_threads(joining(StoreAddress("127.0.0.1", port, is_external=True), 1, 2, timeout_s=1.0)), text)
    del server


def test_a_port_that_is_taken_is_said_at_once():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        text = rf"rank 0 cannot listen on 127\.0\.0\.1:{port}: .* Use a free port of this host, on every rank\.$"
        refused(on_threads(joining(StoreAddress("127.0.0.1", port), 0, 2)), rf"(?s){text}")


def test_other_settings_are_refused_on_every_rank(port):
    address = StoreAddress("127.0.0.1", port)
    calls = [joining(address, 0, 3), joining(address, 1, 3), joining(address, 2, 3, seed=7)]
    refused(
        on_threads(*calls),
        r"all ranks must launch with the same arguments: seed is 1 on rank 0 and 7 on rank 2\.",
    )


def test_two_processes_of_one_rank_are_refused(port):
    address = StoreAddress("127.0.0.1", port)
    one_is_refused = threading.Event()

    def twin():
        try:
            return joining(address, 1, 3)()
        except LaunchError:
            one_is_refused.set()
            raise

    def last():
        one_is_refused.wait(60)
        return joining(address, 2, 3)()

    results = on_threads(joining(address, 0, 3), twin, twin, last)
    assert results.count("two processes have rank 1 of 3. Start each with a rank of its own.") == 1


def test_who_waits_says_for_whom(port, monkeypatch, caplog):
    monkeypatch.setattr(rendezvous, "FIRST_NOTICE_S", 0.05)
    caplog.set_level(logging.WARNING, logger="hybridpp")
    address = StoreAddress("127.0.0.1", port)

    def late():
        while len(caplog.messages) < 3:
            time.sleep(0.01)
        return joining(address, 1, 3)()

    start = time.monotonic()
    on_threads(joining(address, 0, 3), late, joining(address, 2, 3))
    text = r"\[rank 0\] has waited \d+ s for ranks? 1.* to call launch; gives up after 60 s"
    assert re.match(text, caplog.messages[0])
    # Each after twice the time, however long that is on this machine.
    assert 0.05 * 2 ** (len(caplog.messages) - 1) <= time.monotonic() - start


def test_many_ranks_are_named_by_the_first_of_them():
    assert list_ranks([3]) == "rank 3"
    assert list_ranks([1, 2]) == "ranks 1, 2"
    assert list_ranks(list(range(20))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"


def test_a_store_that_is_cut_off_while_ranks_meet_ends_the_wait(monkeypatch):
    monkeypatch.setattr(StoreAddress, "open", lambda *_: HashStore())
    # In native code, a call waits for the answer.
    monkeypatch.setattr(rendezvous, "_register", lambda *_: threading.Event().wait())
    monkeypatch.setattr(rendezvous, "PATIENCE_S", 0.05)
    monkeypatch.setattr(rendezvous, "_GRACE_S", 0.0)
    with pytest.raises(LaunchError, match=r"^rank 1 reached the store of the job at node0:1, which has not answered"):
        wait_for_ranks(StoreAddress("node0", 1), 1, 2, Entry(settings=settings()), 0.05)


def test_a_rank_that_ended_while_ranks_meet_is_named_to_late_ones_too(port):
    address, ended = StoreAddress("127.0.0.1", port), RankProcess("node1", RankProcess.own().view, 2**22 + 1, "7")

    def killed():
        store = rendezvous.PrefixStore("hybridpp", address.open(1, 60.0))
        key = f"reply to request {store.add('requests', 1)}"
        store.set(f"{store.get(key).decode()}/settings of rank 1", json.dumps([settings(), None, ["", *ended]]))

    def late():
        time.sleep(1.5)
        return joining(address, 2, 3)()

    found = on_threads(joining(address, 0, 3), killed, late)
    refused([found[0], found[2]], r"rank 1 \(process 4194305 on node1\) has ended before all ranks had come\. Its own ")
