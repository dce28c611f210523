"""What a rank notes of its actions while a step is recorded."""

import time

import pytest
import torch

from hybridpp.cluster import Awaited
from hybridpp.pipeline.memory_in_use import MemoryReader
from hybridpp.pipeline.recorder import DeviceRecorder, HostRecorder
from hybridpp.schedule import Action, ActionKind

FORWARD, SEND = Action(0, ActionKind.FORWARD, 1), Action(0, ActionKind.SEND_ACTIVATION, 1)


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on by 1 ms each time it is read."""
    now = iter(range(0, 10**12, 10**6))
    monkeypatch.setattr(time, "monotonic_ns", lambda: next(now))


def test_an_action_has_its_wait_its_message_and_its_memory(clock):
    recorder = HostRecorder(0, MemoryReader("allocated", iter((7, 9)).__next__))
    recorder.mark("read")
    recorder.mark("actions")
    recorder.start()
    recorder.start()  # the message has come
    recorder.started("tp", "all_reduce", 100, None)
    recorder.wait_began(Awaited("a collective", (1,), "tp"))
    recorder.wait_ended()
    recorder.end(FORWARD)
    recorder.start()
    recorder.started("pp", "send", 40, 3)
    recorder.end(SEND)
    recorder.mark("")
    forward, send = recorder.actions()
    assert forward == (0, FORWARD, 2, 3, 6, 7, None, 0, 100, 1)
    assert send == (0, SEND, 7, 7, 8, None, 3, 40, 0, 0)
    assert recorder.traffic() == [(0, "tp", "all_reduce", 1, 100), (0, "pp", "send", 1, 40)]
    assert [(mark.step, mark.phase, mark.time_ms) for mark in recorder.marks()] == [
        *((0, "read", 0), (0, "actions", 1), (0, "", 9))
    ]
    assert [(span.kind, span.start_ms, span.end_ms) for span in recorder.spans()] == [("F", 3, 6), ("SEND_F", 7, 8)]


def test_a_wait_before_an_action_begins_is_no_part_of_it(clock):
    recorder = HostRecorder(0)
    recorder.mark("read")
    recorder.start()
    recorder.wait_began(Awaited("a message", (1,), "pp"))
    recorder.wait_ended()
    recorder.start()
    recorder.end(FORWARD)
    (action,) = recorder.actions()
    assert (action.ready_ms, action.start_ms, action.waited_ms, action.memory) == (1, 4, 0, None)
    assert recorder.memory_kind is None


def test_waits_outside_of_actions_are_told_with_their_group(clock):
    recorder = HostRecorder(0)
    recorder.mark("read")
    recorder.wait_ended()  # of a wait that began before the recording
    recorder.wait_began(Awaited("a collective", (1,), "all ranks"))
    recorder.wait_ended()
    assert recorder.waits() == [(0, "all ranks", 1, 2)]


def test_a_step_without_a_batch_and_an_action_that_failed_leave_nothing(clock):
    recorder = HostRecorder(0)
    for fails in (True, False, True):
        recorder.mark("read")
        recorder.start()
        if not fails:
            recorder.end(FORWARD)
        recorder.mark("")
    assert [action.step for action in recorder.actions()] == [0]
    assert [(mark.step, mark.phase) for mark in recorder.marks()] == [(0, "read"), (0, "")]


class Event:
    """An event of a pretended device, whose clock goes on by 1 ms at each."""

    times = iter(())

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        self.time = next(self.times)

    def elapsed_time(self, other):
        return other.time - self.time


class Stream:
    num_waits = 0

    def synchronize(self):
        self.num_waits += 1


def test_a_device_is_timed_by_events_on_the_hosts_clock(monkeypatch):
    stream, device = Stream(), torch.device("cuda", 0)
    monkeypatch.setattr(Event, "times", iter(range(100, 200)))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(time, "monotonic_ns", lambda: 7_000_000)
    recorder = DeviceRecorder(0, device, MemoryReader("device", lambda: 5))
    recorder.mark("read")
    recorder.start()
    recorder.start()
    recorder.end(FORWARD)
    assert stream.num_waits == 0, "the host goes on"
    (action,) = recorder.actions()
    assert (action.ready_ms, action.start_ms, action.end_ms, action.memory) == (9, 10, 11, 5)
    assert recorder.marks() == [(0, "read", 8)]
    assert stream.num_waits == 2
