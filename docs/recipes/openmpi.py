"""A job under Open MPI: ``mpirun`` starts one process for each device, on one host or several.

    export MASTER_ADDR=$(hostname) MASTER_PORT=29500
    mpirun -n 4 -x MASTER_ADDR -x MASTER_PORT python docs/recipes/openmpi.py
    mpirun --host host0:8,host1:8 -x MASTER_ADDR=host0 -x MASTER_PORT python docs/recipes/openmpi.py

``launch_from_openmpi`` reads from Open MPI's environment which rank this is, and how many there are. ``host`` is the
address of the host of rank 0, ``port`` any free port there. Nothing of MPI is used but its launcher.
"""

import os

import torch
from torch import nn

from hybridpp import Booster, DistCoordinator, HybridParallelPlugin, launch_from_openmpi


def main() -> float:
    launch_from_openmpi(host=os.environ["MASTER_ADDR"], port=int(os.environ["MASTER_PORT"]), seed=42)
    coordinator = DistCoordinator()
    pp_size = 2 if coordinator.world_size % 2 == 0 else 1
    plugin = HybridParallelPlugin(tp_size=1, pp_size=pp_size, num_microbatches=4)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    booster = Booster(plugin=plugin)
    model, optimizer, criterion, *_ = booster.boost(
        model, optimizer, nn.MSELoss(), sample=(torch.zeros(1, 16), torch.zeros(1, 16))
    )
    generator = torch.Generator().manual_seed(coordinator.rank // pp_size)  # by replica
    for _ in range(5):
        rows = torch.randn(8, 16, generator=generator)
        loss = booster.execute_pipeline(iter([(rows, rows.flip(1))]), model, criterion, optimizer)["loss"]
        optimizer.step()
    coordinator.print_on_master(f"loss {loss.item():.4f} on {coordinator.world_size} ranks")
    coordinator.destroy()
    return loss.item()


if __name__ == "__main__":
    main()
