import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from processes import after_fork, free_port
from support import ROOT
from torch.distributed import HashStore, TCPStore

from hybridpp.cluster.exit_reports import ExitReports
from hybridpp.cluster.missing_ranks import reporting_missing
from hybridpp.cluster.patient_store import ask
from hybridpp.errors import PeerError


class Silent(HashStore):
    """A store of a host that is cut off: it never answers."""

    def set(self, *arguments):
        threading.Event().wait()

    check = add = get = set


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("hybridpp.cluster.patient_store.PATIENCE_S", 0.05)


def test_answers_and_errors_are_those_of_the_call():
    assert ask(lambda: 3) == 3
    with pytest.raises(KeyError, match="no such key"):
        ask(lambda: {}["no such key"])


def test_no_answer_is_an_error():
    with pytest.raises(RuntimeError, match=r"the job's store has not answered for 0\.05 s"):
        ask(threading.Event().wait, patience_s=0.05)


def test_a_rank_whose_store_is_cut_off_ends_all_the_same(impatient):
    reports = ExitReports(None, 1)
    for question in (
        lambda: reports.report_error(OSError("cut")),
        lambda: reports.claim_first_error(OSError("cut")),
        lambda: reports.exit_reason(0),
    ):
        reports.store = Silent()
        question()
        assert reports.store is None, "it is asked once"


def test_ranks_that_meet_over_a_cut_link_are_told_so_by_their_messages(impatient):
    with pytest.raises(PeerError) as raised, reporting_missing(Silent(), 0, 2, "meeting", "to meet"):
        raise PeerError("rank 1 sent nothing")
    assert not hasattr(raised.value, "__notes__")


# The store answers when the interpreter ends, and that takes a second more.
LATE = """
import os, signal, sys, time
import psutil
from torch.distributed import PrefixStore, TCPStore
from hybridpp.cluster.patient_store import SilentStoreError, ask, ignore_late_answers_at_exit

class AtTheEnd:
    def __del__(self, number=int(sys.argv[2]), kill=os.kill, go_on=signal.SIGCONT, sleep=time.sleep):
        kill(number, go_on)
        sleep(1)

at_the_end = AtTheEnd()
store = PrefixStore("job", TCPStore("localhost", int(sys.argv[1]), is_master=False, wait_for_workers=False))
ignore_late_answers_at_exit(store)
os.kill(int(sys.argv[2]), signal.SIGSTOP)
while psutil.Process(int(sys.argv[2])).status() != psutil.STATUS_STOPPED:
    time.sleep(0.01)
try:
    ask(lambda: store.check(["key"]), 0.1)
except SilentStoreError:
    print("silent", flush=True)
"""


def test_an_answer_that_comes_while_the_interpreter_ends_does_not_abort_it():
    port = free_port()

    def host_store():
        after_fork()
        store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)
        store.set("key", "")
        time.sleep(60)

    server = multiprocessing.get_context("fork").Process(target=host_store)
    server.start()
    try:
        path = os.pathsep.join(str(ROOT / folder) for folder in (".", "plugins"))
        command = [sys.executable, "-c", LATE, str(port), str(server.pid)]
        rank = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "PYTHONPATH": path}
        )
    finally:
        os.kill(server.pid, signal.SIGCONT)
        server.kill()
        server.join()
    assert (rank.returncode, rank.stdout, rank.stderr) == (0, "silent\n", "")
