"""A job on several hosts under Slurm, without torchrun: ``srun`` starts one process for each device.

    sbatch docs/recipes/slurm.sh

``launch_from_slurm`` reads from Slurm's environment which rank this is, and how many there are. ``host`` is the address
of the first host, where rank 0 runs, and ``port`` any free port there: the batch script sets both.
"""

import os

import torch
from torch import nn

from hybridpp import Booster, DistCoordinator, HybridParallelPlugin, get_dist_logger, launch_from_slurm


def main() -> float:
    launch_from_slurm(host=os.environ["MASTER_ADDR"], port=int(os.environ["MASTER_PORT"]), seed=42)
    coordinator = DistCoordinator()
    get_dist_logger().info(f"joined a job of {coordinator.world_size}")  # names its rank

    # Layers are shared by ranks of one host, whose links are fast; stages and replicas are on several.
    tp_size = 2 if coordinator.world_size % 4 == 0 else 1
    pp_size = 2 if coordinator.world_size % 2 == 0 else 1
    plugin = HybridParallelPlugin(tp_size=tp_size, pp_size=pp_size, num_microbatches=4)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    booster = Booster(plugin=plugin)
    model, optimizer, criterion, *_ = booster.boost(
        model, optimizer, nn.MSELoss(), sample=(torch.zeros(1, 16), torch.zeros(1, 16))
    )
    generator = torch.Generator().manual_seed(coordinator.rank // (tp_size * pp_size))  # by replica
    for _ in range(5):
        rows = torch.randn(8, 16, generator=generator)
        loss = booster.execute_pipeline(iter([(rows, rows.flip(1))]), model, criterion, optimizer)["loss"]
        optimizer.step()
    coordinator.print_on_master(f"loss {loss.item():.4f}")
    coordinator.destroy()
    return loss.item()


if __name__ == "__main__":
    main()
