"""An exponential moving average of the weights (EMA): kept, saved, and gone on with.

    torchrun --standalone --nproc-per-node 2 docs/recipes/ema.py

``booster.averaged`` is torch's ``AveragedModel`` of the fp32 weights that are trained, in every precision: each rank
averages what it holds. ``save_model`` writes the complete average, which plain PyTorch loads; ``load_model`` reads it
back into an average, in any layout.
"""

from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from hybridpp import Booster, DistCoordinator, HybridParallelPlugin, launch_from_torch

DECAY = 0.9


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)), nn.Linear(8, 3))


def main(folder: str = "outputs/ema", pp_size: int | None = None, num_steps: int = 6) -> None:
    launch_from_torch(seed=42)
    coordinator = DistCoordinator()
    plugin = HybridParallelPlugin(pp_size=pp_size or coordinator.world_size, num_microbatches=2)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    booster = Booster(plugin=plugin)
    sample = (torch.zeros(1, 8), torch.zeros(1, dtype=torch.long))
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, nn.CrossEntropyLoss(), sample=sample)

    average = booster.averaged(model, get_ema_multi_avg_fn(DECAY))  # after boost
    done = booster.resume(Path(folder, "run"), missing="fresh")
    if done.step:
        booster.load_model(average, Path(folder, f"ema-{done.step}"))

    for step in range(done.step, num_steps):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(4, 8, generator=generator), torch.randint(3, (4,), generator=generator)
        loss = booster.execute_pipeline(iter([batch]), model, criterion, optimizer)["loss"]
        optimizer.step()
        average.update_parameters(model)
        if (step + 1) % 3 == 0:
            # The average first: a checkpoint of the run counts as complete, and then its average must be there.
            booster.save_model(average, Path(folder, f"ema-{step + 1}"))
            booster.save(Path(folder, "run"), step=step + 1)
            coordinator.print_on_master(f"step {step + 1}: loss {loss.item():.4f}")
    booster.save_model(average, Path(folder, "ema.safetensors"))


if __name__ == "__main__":
    main()
