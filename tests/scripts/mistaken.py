"""A job with one mistake, named on the command line; what its ranks print is the point."""

import os
import sys

import torch
from torch import nn

from hybridpp import Booster, DistCoordinator, HybridParallelPlugin, launch_from_torch

_, mistake = sys.argv
os.environ["MASTER_PORT"] = os.environ.get("AGENT_PORT", os.environ["MASTER_PORT"])
launch_from_torch(backend="glow" if mistake == "backend" else "gloo", timeout_s=60)
coordinator = DistCoordinator()
if mistake == "path":
    open(f"/nowhere/part-{coordinator.rank}")  # noqa: SIM115


class Block(nn.Linear):
    """A layer whose forward may be wrong."""

    def forward(self, x):
        if mistake == "model" and self.number == 3:
            return super().forward(torch.cat([x, x], dim=1))
        return super().forward(x).tanh()


def criterion(outputs, inputs):
    if mistake == "criterion":
        return outputs.no_such_attribute
    if mistake == "killed" and coordinator.rank == 5:
        os.kill(os.getpid(), 9)
    return outputs.square().mean()


torch.manual_seed(0)
model = nn.Sequential(*(Block(8, 8) for _ in range(4)))
for number, block in enumerate(model):
    block.number = -1 if mistake == "model" else number
plugin = HybridParallelPlugin(pp_size=3 if mistake == "setting" else 2, num_microbatches=2)
booster = Booster(plugin=plugin, device="cpu")
rows = torch.ones(2, 8)
model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), sample=rows)
for number, block in enumerate(model):
    block.number = number
data = iter([rows] * 2)
try:
    for _ in range(3 if mistake == "data" else 2):
        booster.execute_pipeline(data, model, criterion, optimizer)
        optimizer.step()
finally:
    coordinator.destroy()
