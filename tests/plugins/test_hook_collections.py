"""Which results of modules inside of blocks are read by hooks."""

import torch
from hybridpp_plugins.hook_collections import watched_collections
from torch import nn


class TwoResults(nn.Module):
    def forward(self, x):
        return x + 1, x * 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = TwoResults()
        self.last = nn.Linear(2, 2)

    def forward(self, x):
        return self.last(self.inner(x)[0])


def test_results_that_hooks_keep_are_told_from_those_that_they_look_at():
    model = nn.Sequential(Block(), Block())
    kept, sums = [], []
    model[1].last.register_forward_hook(lambda module, args, output: sums.append(output.sum().item()))
    with watched_collections(model, ["0", "1"]) as collected:
        # Some models register theirs in their first forward.
        model[0].inner.register_forward_hook(lambda module, args, output: kept.append(output[1].detach()))
        model(torch.ones(1, 2))
    assert collected == {"0": {("inner", 1)}, "1": set()}
    assert sums
