"""A job under Ray Train: ``TorchTrainer`` starts one worker for each rank, and starts them again when one fails.

    pip install "hybridpp[ray]"
    python docs/recipes/ray_train.py

The workers have joined torch's process group when their function begins, so it calls no launch: the plugin takes over
that group. What a worker reports is that of its rank; the loss is the same on all.
"""

import os
from typing import Any

import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig, report
from ray.train.torch import TorchTrainer
from torch import nn

from hybridpp import Booster, DistCoordinator, HybridParallelPlugin


def train(config: dict[str, Any]) -> None:
    """On every worker."""
    torch.manual_seed(config["seed"])
    coordinator = DistCoordinator()
    pp_size = 2 if coordinator.world_size % 2 == 0 else 1
    plugin = HybridParallelPlugin(tp_size=1, pp_size=pp_size, num_microbatches=4)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    booster = Booster(plugin=plugin)
    model, optimizer, criterion, *_ = booster.boost(
        model, optimizer, nn.MSELoss(), sample=(torch.zeros(1, 16), torch.zeros(1, 16))
    )
    done = booster.resume(config["folder"], missing="fresh")  # where a worker that failed began again
    for step in range(done.step, 5):
        generator = torch.Generator().manual_seed(1000 * step + coordinator.rank // pp_size)  # by step and replica
        rows = torch.randn(8, 16, generator=generator)
        loss = booster.execute_pipeline(iter([(rows, rows.flip(1))]), model, criterion, optimizer)["loss"]
        optimizer.step()
        booster.save(config["folder"], step=step + 1, keep_last=2)
        report({"loss": loss.item(), "step": step + 1})
        coordinator.print_on_master(f"step {step + 1}: loss {loss.item():.4f} on {coordinator.world_size} ranks")


def main(folder: str, num_workers: int = 2) -> None:
    """Train; ``folder`` is for checkpoints, and must be one that all hosts see."""
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": folder, "seed": 42},
        scaling_config=ScalingConfig(num_workers=num_workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    )
    trainer.fit()


if __name__ == "__main__":
    main(os.path.abspath("outputs/ray"))
