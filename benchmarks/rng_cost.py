"""The host time that RNG streams add to a forward, per linear layer inside a unit.

    OMP_NUM_THREADS=1 PYTHONPATH=.:plugins python benchmarks/rng_cost.py

Blocks of small linear layers run as one stage: without hybridpp, as they are set up (nothing draws, so nothing is
seeded), and with every unit and layer seeded. The three take turns; the least time of each counts, because a busy host
only makes them longer.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn

from hybridpp.module_adapter import ModuleAdapter
from hybridpp.partition import StagedModel

CPU = torch.device("cpu")


class Block(nn.Module):
    """As many linear layers as a block of Llama."""

    def __init__(self, num_layers: int):
        super().__init__()
        self.names = [f"fc{number}" for number in range(num_layers)]
        for name in self.names:
            setattr(self, name, nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.names:
            x = getattr(self, name)(x)
        return x


class Blocks(nn.Module):
    """Blocks in a row."""

    def __init__(self, num_blocks: int, num_layers: int):
        super().__init__()
        self.layers = nn.ModuleList(Block(num_layers) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def forward_of(num_blocks: int, num_layers: int, seeds_all: bool) -> Callable[[torch.Tensor], object]:
    """The forward of one stage."""
    staged = StagedModel(ModuleAdapter(Blocks(num_blocks, num_layers)), 1, [0], device=CPU, samples=[])
    plan = staged.plans((), {})[0]
    if seeds_all:
        staged._drawing_parts.now = lambda stage, is_grad_enabled: None  # type: ignore[assignment,method-assign,return-value]
    return lambda x: staged.forward(plan, (x,), {}, [], 0, False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.ones(1, 4)
    runs: dict[str, Callable[[torch.Tensor], object]] = {
        "without hybridpp": Blocks(args.blocks, args.layers),
        "seeded where it draws": forward_of(args.blocks, args.layers, seeds_all=False),
        "seeded everywhere": forward_of(args.blocks, args.layers, seeds_all=True),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    with torch.no_grad():
        for _ in range(args.rounds):
            for name, run in runs.items():
                start = time.perf_counter()
                run(x)
                times[name].append(time.perf_counter() - start)
    plain = min(times["without hybridpp"])
    print("| forward | µs per linear layer, of hybridpp |")
    print("|---|--:|")
    for name in list(runs)[1:]:
        print(f"| {name} | {(min(times[name]) - plain) / (args.blocks * args.layers) * 1e6:.2f} |")


if __name__ == "__main__":
    main()
