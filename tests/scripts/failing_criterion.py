"""A job in which the last rank alone raises in the middle of a step; run under torchrun by a test."""

import time

import torch
from torch import nn

from hybridpp import Booster, DistCoordinator, HybridParallelPlugin, launch_from_torch

launch_from_torch(backend="gloo")
coordinator = DistCoordinator()
model, rows = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), torch.ones(4, 4)
plugin = HybridParallelPlugin(tp_size=1, pp_size=2, num_microbatches=2, precision="fp32")
booster = Booster(plugin=plugin, device="cpu")
model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), sample=rows[:2])


def criterion(outputs, inputs):
    if coordinator.rank == coordinator.world_size - 1:
        print("raises at", time.monotonic(), flush=True)
        raise RuntimeError("the criterion broke")
    return outputs.square().mean()


booster.execute_pipeline(iter([rows]), model, criterion, optimizer)
