"""A job of two ranks: rank 1 dies in the first attempt, and raises in a step of the second; torchrun starts it."""

import os
import sys
import time

import torch
from torch import nn

from hybridpp import Booster, DistCoordinator, HybridParallelPlugin, launch_from_torch
from hybridpp.cluster import current_world

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
launch_from_torch(backend="gloo", timeout_s=30)
coordinator = DistCoordinator()
total = torch.tensor([coordinator.rank + 1.0])
group = current_world().split([[0, 1]])
group.all_reduce(total).wait()
coordinator.print_on_master(f"attempt {attempt} sum {total.item()}")
coordinator.block_all()
if attempt == 0:
    if coordinator.rank == 1:
        os._exit(3)
    # A rank that waits for another when that dies.
    coordinator.block_all()
print("the last attempt goes on", file=sys.stderr, flush=True)
coordinator.block_all()

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
