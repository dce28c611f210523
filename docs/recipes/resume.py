"""A run that may be stopped at any moment, and goes on where it was, in whatever layout it is started again.

    torchrun --standalone --nproc-per-node 2 docs/recipes/resume.py
    torchrun --standalone --nproc-per-node 1 docs/recipes/resume.py     # goes on, on one process

A checkpoint holds everything that the next step depends on, the position in the shuffled data and the generators among
them, so the losses are those of a run without a break.
"""

import torch
from torch import nn

from hybridpp import Booster, DistCoordinator, HybridParallelPlugin, launch_from_torch
from hybridpp.optim import LinearWarmupLR

FOLDER = "outputs/resume"


def make_model() -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Tanh()) for _ in range(4)), nn.Linear(8, 3)
    )


def samples() -> list[tuple[torch.Tensor, int]]:
    rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return [(row, number % 3) for number, row in enumerate(rows)]


def main(
    folder: str = FOLDER, pp_size: int | None = None, epochs: int = 2, max_steps: int | None = None
) -> list[float]:
    launch_from_torch(seed=42)
    coordinator = DistCoordinator()
    plugin = HybridParallelPlugin(pp_size=pp_size or coordinator.world_size, num_microbatches=2)
    dataloader = plugin.prepare_dataloader(samples(), batch_size=8, shuffle=True, seed=1)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    lr_scheduler = LinearWarmupLR(optimizer, total_steps=epochs * len(dataloader), warmup_steps=4)

    booster = Booster(plugin=plugin)
    model, optimizer, criterion, dataloader, lr_scheduler = booster.boost(
        model, optimizer, nn.CrossEntropyLoss(), dataloader, lr_scheduler
    )

    done = booster.resume(folder, missing="fresh")  # every rank; after boost
    coordinator.print_on_master(f"begins at step {done.step}: epoch {done.epoch}, batch {done.batches}")
    losses, step = [], done.step
    for epoch in range(done.epoch, epochs):
        data_iter = iter(dataloader)  # of the epoch that was interrupted: what is left of it
        for _ in range(done.batches if epoch == done.epoch else 0, len(dataloader)):
            losses.append(booster.execute_pipeline(data_iter, model, criterion, optimizer)["loss"].item())
            optimizer.step()
            lr_scheduler.step()
            step += 1
            if step % 3 == 0:
                booster.save(folder, step=step, keep_last=2)
            if step == max_steps:  # here: as if the job had been killed
                return losses
    booster.save(folder, step=step)
    return losses


if __name__ == "__main__":
    main()
