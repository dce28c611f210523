"""A thread that writes in the background uses a share of a processor, until someone waits for it."""

import threading
import time

import pytest

from hybridpp.checkpoint import pace as paces
from hybridpp.checkpoint.pace import Pace, processors


class Clocks:
    """Clocks that move as a test says, and what was rested."""

    def __init__(self, monkeypatch):
        self.used = self.now = 0.0
        monkeypatch.setattr(time, "thread_time", lambda: self.used)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def work(self, processor_s, wall_s):
        self.used, self.now = self.used + processor_s, self.now + wall_s


@pytest.fixture
def clocks(monkeypatch):
    return Clocks(monkeypatch)


@pytest.fixture
def rests(monkeypatch, clocks):
    found = []

    def rest(event, left):
        found.append(left)
        clocks.now += left

    monkeypatch.setattr(threading.Event, "wait", rest)
    return found


@pytest.mark.parametrize(("share", "wall_s", "rested"), [(0.1, 0.02, [0.1, 0.08]), (0.1, 0.5, []), (1.0, 0.02, [])])
def test_a_rest_fills_up_what_waiting_for_the_disk_did_not(clocks, rests, share, wall_s, rested):
    pace = Pace(share)
    for _ in range(2):
        clocks.work(0.02, wall_s)
        pace.rest()
    assert rests == pytest.approx(2 * rested)


def test_who_waits_for_the_thread_ends_its_rests(clocks):
    pace = Pace(1e-9)
    thread = threading.Thread(target=lambda: [clocks.work(1.0, 1.0), pace.rest(), clocks.work(1.0, 1.0), pace.rest()])
    thread.start()
    pace.hurry()
    thread.join(30)
    assert not thread.is_alive()


def test_the_end_of_the_process_ends_them(clocks, rests, monkeypatch):
    ended = threading.Thread()
    monkeypatch.setattr(paces.threading, "main_thread", lambda: ended)
    pace = Pace(0.1)
    clocks.work(1.0, 1.0)
    pace.rest()
    assert not rests


def test_a_process_has_a_processor():
    assert processors() >= 1
