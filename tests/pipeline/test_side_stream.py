"""Inputs of micro-batches are copied on a stream beside the current one."""

from contextlib import contextmanager
from typing import NamedTuple

import torch

from hybridpp.pipeline import Microbatch
from hybridpp.pipeline.boundary import InputCopies, StepInputs


def step(copies, *batches):
    return StepInputs(copies, [Microbatch(batch, 1, 1.0) for batch in batches], training=True, is_cut=False)


class Event(NamedTuple):
    what: str
    detail: object = None


class Recorded:
    """A side stream that notes what is asked of it."""

    def __init__(self):
        self.events = []

    @contextmanager
    def active(self):
        self.events.append(Event("copy"))
        yield

    def wait_for_current(self):
        self.events.append(Event("wait for current"))

    def mark(self):
        self.events.append(Event("mark", len(self.events)))
        return len(self.events) - 1

    def hand_over(self, mark, tensors):
        assert self.events[mark] == Event("mark", mark)
        self.events.append(Event("hand over", [tensor.tolist() for tensor in tensors]))


def test_the_next_inputs_are_copied_on_a_side_stream_while_a_stage_runs():
    side = Recorded()
    inputs = step(InputCopies(torch.device("cpu"), side), *(torch.full((1,), float(number)) for number in range(3)))
    inputs.expect([(0, 0), (0, 1), (0, 2)])
    taken = []
    for number in range(3):
        taken.append(inputs.take(0, number).item())
        side.events.append(Event("run", number))
    assert taken == [0, 1, 2]
    assert [(event.what, event.detail) for event in side.events if event.what != "mark"] == [
        ("copy", None),
        ("hand over", [[0.0]]),
        ("copy", None),
        ("run", 0),
        ("hand over", [[1.0]]),
        ("copy", None),
        ("run", 1),
        ("hand over", [[2.0]]),
        ("run", 2),
    ]


def test_a_batch_on_the_device_is_copied_after_what_makes_it():
    side = Recorded()
    step(InputCopies(torch.device("meta"), side), torch.ones(1, device="meta"))._copy((0, 0))
    assert [event.what for event in side.events] == ["wait for current", "copy", "mark"]
