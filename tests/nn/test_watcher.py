"""Modes that watch what runs, and compiled code."""

import torch
from torch.overrides import TorchFunctionMode

from hybridpp.nn.watcher import WatchingMode, run_unwatched


class Notes(WatchingMode):
    def __init__(self):
        super().__init__()
        self.seen, self.results = [], []

    def made(self, result):
        self.results.append(result)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(function.__name__)
        return function(*args, **(kwargs or {}))


class Other(TorchFunctionMode):
    num_calls = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        Other.num_calls += 1
        return function(*args, **(kwargs or {}))


def test_compiled_code_runs_outside_of_watchers_and_inside_of_other_modes():
    with Notes() as notes, Other():
        found = run_unwatched(torch.exp, torch.zeros(2))
        torch.neg(found)
    assert notes.seen == ["zeros", "neg"]
    assert notes.results == [found]
    assert Other.num_calls == 3
