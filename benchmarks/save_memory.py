"""Peak memory of the ranks while they save: what comes on top of their share.

    PYTHONPATH=.:plugins torchrun --standalone --nproc-per-node 4 benchmarks/save_memory.py --pp-size 2 --tp-size 2

48 linear layers of 1024 x 1024 with AdamW in fp32: 192 MiB of weights, 576 MiB with the moments. Before each save the
kernel's mark of the largest resident memory is set back (Linux); what is printed is the mark after the save, less what
was resident before it.
"""

import argparse
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hybridpp import Booster, DistCoordinator, HybridParallelPlugin, launch_from_torch

WIDTH, NUM_LAYERS = 1024, 48


def memory_kib(mark: str) -> int:
    found = re.search(rf"{mark}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def growth_mib(save: Callable[[], Any]) -> float:
    """By how much resident memory grows at most during a call."""
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_kib("VmRSS")
    save()
    return (memory_kib("VmHWM") - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pp-size", type=int, default=1)
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--zero-stage", type=int, default=0)
    parser.add_argument("--shard-mb", type=int, default=32)
    args = parser.parse_args()
    launch_from_torch(seed=0)
    coordinator = DistCoordinator()
    plan = {str(n): "column" if n % 2 == 0 else "row" for n in range(NUM_LAYERS)}
    plugin = HybridParallelPlugin(
        pp_size=args.pp_size,
        tp_size=args.tp_size,
        zero_stage=args.zero_stage,
        num_microbatches=args.pp_size,
        tensor_parallel_plan=plan if args.tp_size > 1 else None,
        precision="fp32",
    )
    booster = Booster(plugin=plugin)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)])
    batch = torch.randn(8, WIDTH)
    parts = booster.boost(
        model, torch.optim.AdamW(model.parameters()), lambda out, _: out.square().mean(), sample=batch
    )
    booster.execute_pipeline(iter([batch] * 4), parts.model, parts.criterion, parts.optimizer)
    parts.optimizer.step()
    shared: list[Any] = [tempfile.mkdtemp() if coordinator.rank == 0 else None]
    torch.distributed.broadcast_object_list(shared, 0)
    folder = Path(shared[0])
    growths = [
        growth_mib(lambda: booster.save_model(parts.model, folder / "model", size_per_shard=args.shard_mb)),
        growth_mib(lambda: booster.save(folder / "run", step=1)),
    ]
    rows: list[Any] = [None] * coordinator.world_size
    torch.distributed.all_gather_object(rows, growths)
    if coordinator.rank == 0:
        for what, values in zip(("save_model", "save"), zip(*rows, strict=True), strict=True):
            print(f"{what}: MiB on top, by rank: {', '.join(f'{value:.0f}' for value in values)}")
        shutil.rmtree(folder)
    coordinator.destroy()


if __name__ == "__main__":
    main()
