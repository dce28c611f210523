"""Hooks of PyTorch on a model in stages: to look at activations, and to change them.

    torchrun --standalone --nproc-per-node 2 docs/recipes/hooks.py

A hook on a block runs where the block runs, once for each micro-batch, with real values. Register hooks before
``boost`` or after it. Each rank sees its own blocks; to have all numbers on one rank, gather them.
"""

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridpp import Booster, DistCoordinator, HybridParallelPlugin, launch_from_torch


class Statistics:
    """The root mean square of what each block returns, over the micro-batches of a step."""

    def __init__(self, model: nn.Module, names: list[str]):
        self._sums: dict[str, list[float]] = defaultdict(list)
        self.handles = [model.get_submodule(name).register_forward_hook(self._note(name)) for name in names]

    def _note(self, name: str) -> Any:
        def note(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self._sums[name].append(output.detach().square().mean().item())

        return note

    def gathered(self) -> dict[str, float]:
        """By block, from all ranks. Collective: every rank."""
        own = {name: (sum(values) / len(values)) ** 0.5 for name, values in self._sums.items()}
        self._sums.clear()
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, own)
        return {name: value for part in parts for name, value in part.items()}


def scale_noise(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """A hook that returns something changes the result, on the stage of its block."""
    return output * 0.5


def main(pp_size: int | None = None) -> dict[str, float]:
    launch_from_torch(seed=42)
    coordinator = DistCoordinator()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    statistics = Statistics(model, ["0", "1", "2", "3"])
    model[2].register_forward_hook(scale_noise)

    plugin = HybridParallelPlugin(pp_size=pp_size or coordinator.world_size, num_microbatches=2)
    booster = Booster(plugin=plugin)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sample = (torch.zeros(1, 8), torch.zeros(1, 8))
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, nn.MSELoss(), sample=sample)
    rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    booster.execute_pipeline(iter([(rows, -rows)]), model, criterion, optimizer)
    optimizer.step()
    found = statistics.gathered()
    for name, value in sorted(found.items()):
        coordinator.print_on_master(f"block {name}: {value:.4f}")
    for handle in statistics.handles:
        handle.remove()
    return found


if __name__ == "__main__":
    main()
