"""A request to stop in loops that run the backward pass themselves: every rank sees it after the same call."""

import math
import signal
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback, current_world


@pytest.mark.parametrize("layout", [{"dp_size": 2}, {"tp_size": 2, "dp_size": 2}])
def test_loops_of_backward_learn_of_it_in_the_second_call_outside_no_sync(layout):
    size = math.prod(layout.values())

    def run():
        booster = Booster(plugin=HybridParallelPlugin(tp_size=layout.get("tp_size", 1)))
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer, *_ = booster.boost(model, optimizer, sample=torch.ones(2, 6))
        seen = []
        for call in range(6):
            if call == 2 and current_world().rank == size - 1:
                current_world().stop.own = signal.SIGTERM
            is_local = call == 3
            with booster.no_sync(model) if is_local else nullcontext():
                booster.backward(model(torch.ones(2, 6)).square().mean(), optimizer)
            if not is_local:
                optimizer.step()
            seen.append(booster.interrupted)
        return seen

    assert Loopback(size).run(run) == [[False, False, False, False, True, True]] * size
