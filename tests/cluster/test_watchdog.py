"""Jobs that hang are reported once and ended; jobs that trace for long are not. Four ranks where replicas wait."""

import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from processes import run_script
from support import ROOT
from torch.distributed import PrefixStore, TCPStore

from hybridpp.cluster.hang_report import WatchedState, group_key
from hybridpp.cluster.progress import Awaited, Progress
from hybridpp.cluster.rank_process import RankProcess
from hybridpp.cluster.watchdog import Watchdog, WatchedRank
from hybridpp.cluster.watchdog_board import WatchdogBoard
from hybridpp.cluster.watchdog_limits import WatchdogLimits

SCRIPT = ROOT / "tests/scripts/hanging.py"


@pytest.fixture(autouse=True)
def agent(monkeypatch):
    """A store that outlives the ranks, as that of torchrun's agent."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("AGENT_PORT", str(store.port))
    return store


@pytest.mark.parametrize(
    ("size", "what", "rank", "where", "expected"),
    [
        (2, "sleep", 1, "1F2", "it is in training step 3 of Model, forward of stage 1, micro-batch 2 (1F2)."),
        (2, "stop", 0, "0B1", "Its process is stopped (SIGSTOP, or job control), so it cannot show its stack."),
        (4, "sleep", 3, "loader", "reading a batch from a DataLoader of"),
        (2, "hold", 0, "0F1", "Rank 0 runs no Python code: code in C holds its interpreter."),
    ],
)
def test_a_hang_is_reported_once_with_its_place(size, what, rank, where, expected):
    job = run_script(size, SCRIPT, what, str(rank), where, "limit=5")
    assert job.stderr.count("this job hangs") == 1, job.stderr
    assert re.findall(r"The first suspect is rank (\d)", job.stderr) == [str(rank)]
    assert expected in job.stderr
    if what != "stop":
        assert "hanging.py" in job.stderr.split("The Python stack")[1]
    # 9 of a process that could not end itself.
    assert job.returncode in (75, os.EX_OK + 9)


def test_a_save_that_holds_up_the_end_of_a_script_is_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("FOLDER", str(tmp_path))
    job = run_script(2, SCRIPT, "lock", "1", "background", "limit=5", "save=3", "wait=0")
    assert re.findall(r"The first suspect is rank (\d)", job.stderr) == ["1"], job.stderr
    assert "waits for the part of a save of rank 1" in job.stderr
    assert "and of its thread hybridpp save" in job.stderr


def test_a_trace_that_takes_longer_than_a_step_may_is_no_hang():
    job = run_script(2, SCRIPT, "sleep", "1", "trace", "limit=5", "pause=7")
    assert job.returncode == 0, job.stderr
    assert "this job hangs" not in job.stderr
    assert job.stdout.count("DONE") == 2


def test_a_pause_of_the_script_on_one_rank_is_told_once_and_goes_on():
    job = run_script(2, SCRIPT, "sleep", "1", "script", "limit=2", "pause=6", "steps=5")
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("DONE") == 2
    assert "this job hangs" not in job.stderr
    told = re.findall(r"rank 0 waits for rank 1, which has been in your script for (\S+) s \(watchdog_s\)", job.stderr)
    assert len(told) == 1
    assert float(told[0]) >= 2
    assert re.search(r"Rank 1 \(process \d+ on \S+\) has not come to training step 4 of Model", job.stderr)
    assert "hanging.py" in job.stderr.split("The Python stack of rank 1")[1]
    assert "If it lasts for 270 s, all ranks end with exit code 75. To set another limit, change" in job.stderr
    assert 'launch_from_torch(watchdog_s={"step": 2, "script": 270}).' in job.stderr


def test_a_rank_that_does_not_come_from_the_script_has_a_limit_of_its_own():
    job = run_script(4, SCRIPT, "sleep", "2", "script", "limit=5", "script=5", "steps=5")
    assert re.findall(r"The first suspect is rank (\d)", job.stderr) == ["2"], job.stderr
    assert "Rank 2 has not come to training step 4 of Model" in job.stderr
    assert re.search(r"it is in your code at \S*hanging.py:\d+ in hang", job.stderr)


class Alarm(Exception):
    """Raised in place of the end of the process."""


class Board:
    """A board on which rank 1 of two has published a state, and publishes no more."""

    rank, size = 0, 2

    def __init__(self, last):
        self.last = last

    def publish(self, state):
        return False

    def states(self, ranks):
        return [self.last.as_text() for _ in ranks]

    def claim(self, alarm):
        raise Alarm(alarm["suspect"], alarm["is_silent"])


def test_nothing_is_concluded_from_states_of_ranks_that_may_be_gone(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    now = 0.0
    monkeypatch.setattr("hybridpp.cluster.watchdog.time.monotonic", lambda: now)
    # In an earlier step, rank 1 waited for a collective to which all have come.
    started = {group_key("dp", (0, 1)): 3}
    last = WatchedState(
        rank=1, process=RankProcess("node8", "other", 1, ""), awaited=Awaited("a collective", (0,), "dp", 3),
        started=started,
    )  # fmt: skip
    progress = Progress()
    progress.section, progress.awaited = "step", lambda: Awaited("a message", (1,), "pp")
    rank = WatchedRank(progress, lambda: started, lambda rank: "")
    watchdog, alarm = Watchdog(Board(last), rank, WatchdogLimits.of(10.0, timeout_s=600.0)), ()
    while not alarm:
        try:
            watchdog._tick()
        except Alarm as raised:
            alarm = raised.args
        now += 2.0
    assert alarm == (1, True), "rank 1 gives no sign of life"
    assert now <= 18.0


def test_the_second_rank_that_raises_the_alarm_finds_the_first_one(agent):
    first, second = (WatchdogBoard(PrefixStore("job", agent), rank, 2, 10.0) for rank in (0, 1))
    store = first._store

    class Slow:
        def __getattr__(self, name):
            return getattr(store, name)

        def set(self, key, value):
            time.sleep(1)
            store.set(key, value)

    first._store = Slow()
    with ThreadPoolExecutor() as pool:
        claimed = pool.submit(first.claim, {"reporter": 0})
        time.sleep(0.3)
        assert not second.claim({"reporter": 1})
        assert second.get("alarm") == {"reporter": 0}
        assert claimed.result()
    first.close()
    second.close()
