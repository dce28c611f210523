"""A job without a model, whose rank 1 dies in every attempt but the last; run under torchrun by a test."""

import os

import torch

from hybridpp.cluster import DistCoordinator, current_world, launch_from_torch

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
launch_from_torch(backend="gloo", timeout_s=30)
coordinator = DistCoordinator()
total = torch.tensor([coordinator.rank + 1.0])
group = current_world().split([[0, 1]])
group.all_reduce(total).wait()
coordinator.print_on_master(f"attempt {attempt} sum {total.item()}")
coordinator.block_all()
if attempt < int(os.environ["TORCHELASTIC_MAX_RESTARTS"]) and coordinator.rank == 1:
    os._exit(3)
# A rank that waits for another when that dies.
coordinator.block_all()
coordinator.destroy()
