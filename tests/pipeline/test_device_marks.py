"""Marks of actions, on a device that is made up."""

from hybridpp.pipeline import DeviceMarks
from hybridpp.schedule import Action, ActionKind


class Event:
    def __init__(self, device):
        self.device = device

    def record(self):
        self.number = self.device["launched"] = self.device["launched"] + 1

    def query(self):
        return self.number <= self.device["finished"]


def test_the_first_unfinished_action_is_known_with_what_it_needs():
    device = {"launched": 0, "finished": 0}
    marks = DeviceMarks((4, 6), lambda: Event(device))
    for _ in range(2):
        marks.begin((0, 1), 1)
        for kind, microbatch in ((ActionKind.FORWARD, 0), (ActionKind.FORWARD, 1), (ActionKind.BACKWARD, 0)):
            marks.add(Action(1, kind, microbatch))
    assert marks.work()[1:3] == ("forward of stage 1, micro-batch 0 (1F0)", (4, "0F0"))
    device["finished"] = 5
    work = marks.work()
    assert (work.step, work.action, work.needs) == (2, "backward of stage 1, micro-batch 0 (1B0)", None)
    assert work.finished == ("1F0", "1F1")
    device["finished"] = 6
    assert marks.work().action == ""
    marks.begin((0, 1), 1)
    assert len(marks._free) == 6, "events are used again"
