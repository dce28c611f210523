"""A script for ``accelerate launch``, for those whose jobs are started by it.

    accelerate launch --num_processes 4 docs/recipes/accelerate_launch.py                # on CUDA devices
    accelerate launch --multi_gpu --num_processes 4 docs/recipes/accelerate_launch.py    # without any: on the CPU

It starts processes as torchrun does, so the launch is the same. ``--multi_gpu`` makes it start several processes on a
host that has no CUDA device, too; ``--cpu`` starts one. What its configuration says of precision, ZeRO or FSDP is for
an ``Accelerator``, which this script has none of: settings are the plugin's.
"""

import torch
from torch import nn

from hybridpp import Booster, DistCoordinator, HybridParallelPlugin, launch_from_torch


def main() -> float:
    launch_from_torch(seed=42)
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
