"""What a hook does is read from its code, and what it can reach from what it refers to."""

import functools

import pytest
from torch import nn

from hybridpp.partition.hook_inspection import only_observes
from hybridpp.partition.hooks import ModelHooks


class Noting:
    last = None

    def look(self, module, args, output):
        print(output.shape)

    def keep(self, module, args, output):
        self.last = output


def two_ways(module, args, output):
    return args and None


@pytest.mark.parametrize(
    ("hook", "looks"),
    [
        (Noting().look, True),
        (functools.partial(Noting.look, Noting()), True),
        (lambda module, args, output: None, True),
        (lambda module, args, output: output, False),
        (lambda module, args, output: output.mul_(2) and None, False),
        (Noting().keep, False),
        (two_ways, False),
        (print, False),
    ],
)
def test_what_a_hook_does_shows_in_its_code(hook, looks):
    assert only_observes(hook) == ModelHooks(nn.Linear(1, 1)).is_observer(hook) == looks


def test_of_what_a_hook_could_reach_only_what_is_near_is_put_back():
    far = []

    class Trainer:
        def __init__(self):
            self.seen = {"outputs": []}
            self.everything = [[[[[far]]]]]

        def hook(self, module, args, output):
            self.seen["outputs"].append(output)

    trainer, model = Trainer(), nn.Linear(2, 2)
    model.register_forward_hook(trainer.hook)
    with ModelHooks(model).disabled_for_trace():
        trainer.seen["outputs"].append(1)
        far.append(1)  # as another thread may
    assert (trainer.seen["outputs"], far) == ([], [1])
