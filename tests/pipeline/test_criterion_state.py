"""What a criterion keeps between its calls, while it is called to look at its loss."""

import functools

import torch
from torch import nn

from hybridpp.pipeline.criterion_state import unchanged


class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.calls, self.seen = 0, {"sizes": 0}

    def forward(self, value):
        self.calls += 1
        self.seen["sizes"] += 1
        self.mean.add_(value)
        self.last = value
        return value


class Counter:
    def __init__(self):
        self.inner, self.values = Kept(), []

    def __call__(self, value, scale=1):
        self.values.append(value)
        return self.inner(scale * value)


def test_state_of_modules_and_objects_is_as_before_and_not_written_to():
    counter = Counter()
    for criterion in (counter, counter.__call__, functools.partial(counter, scale=2), lambda value: counter(value)):
        buffer, version = counter.inner.mean, counter.inner.mean._version
        with unchanged(criterion):
            criterion(1.0)
            assert counter.inner.calls == 1
            assert counter.inner.mean is not buffer
        inner = counter.inner
        assert (inner.calls, inner.seen, counter.values, hasattr(inner, "last")) == (0, {"sizes": 0}, [], False)
        assert inner.mean is buffer
        assert buffer._version == version


RUNNING, TABLE = {"mean": 0.0}, torch.ones(2)


def test_so_are_variables_of_closures_and_globals_and_changes_are_named():
    count, running = 0, Counter()

    def criterion(value):
        nonlocal count
        count += 1
        RUNNING["mean"] += value
        TABLE.mul_(0.5)
        return running(value * count)

    with unchanged(criterion) as changes:
        assert changes() == []
        criterion(1.0)
        assert {*changes()} >= {"RUNNING", "TABLE", "count", "Counter.values", "Kept.calls", "Kept.mean", "Kept.last"}
    assert (count, RUNNING, TABLE.tolist(), running.values) == (0, {"mean": 0.0}, [1.0, 1.0], [])
