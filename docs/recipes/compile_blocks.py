"""Compiled blocks: one graph for all equal blocks, with every schedule.

    torchrun --standalone --nproc-per-node 2 docs/recipes/compile_blocks.py

Do not compile the model: a rank holds a part of it, and its code between the blocks runs on every stage. The blocks are
where the time goes. The first step compiles; ``TORCH_LOGS=recompiles`` in the environment shows whether later ones do,
too, which costs seconds each: keep shapes equal (``drop_last=True``, padded or packed texts).
"""

import time

import torch
from torch import Tensor, nn

from hybridpp import Booster, DistCoordinator, HybridParallelPlugin, launch_from_torch

WIDTH = 64


class Block(nn.Module):
    """What a compiler fuses: a norm, an activation function, a residual."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main(compile_blocks: bool | dict = True, pp_size: int | None = None, num_steps: int = 5) -> list[float]:
    launch_from_torch(seed=42)
    coordinator = DistCoordinator()
    plugin = HybridParallelPlugin(
        pp_size=pp_size or coordinator.world_size, num_microbatches=4, compile_blocks=compile_blocks
    )
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters())
    booster = Booster(plugin=plugin)
    sample = (torch.zeros(2, WIDTH), torch.zeros(2, WIDTH))
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, nn.MSELoss(), sample=sample)
    losses = []
    for step in range(num_steps):
        rows = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        started = time.perf_counter()
        losses.append(booster.execute_pipeline(iter([(rows, -rows)]), model, criterion, optimizer)["loss"].item())
        optimizer.step()
        coordinator.print_on_master(f"step {step}: loss {losses[-1]:.4f}, {time.perf_counter() - started:.3f} s")
    return losses


if __name__ == "__main__":
    main()
