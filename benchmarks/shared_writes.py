r"""Two replicas write a checkpoint: the first one alone, against each its part, DCP and torch.save on rank 0.

    OMP_NUM_THREADS=1 PYTHONPATH=.:plugins torchrun --standalone --nproc-per-node 2 \
        benchmarks/shared_writes.py --folder /dev/shm

24 linear layers of 1024 x 1024 with AdamW in fp32 (288 MiB with the moments), gloo. Every round runs each variant once,
in a new order that all ranks share, and removes what it wrote; the time is that of the slowest rank. All variants sync.
"""

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hybridpp_plugins import rank_shares
from torch import nn

from hybridpp import Booster, HybridParallelPlugin, launch_from_torch

WIDTH, NUM_LAYERS = 1024, 24


class Replicas:
    """A model on two replicas that has taken a step, and ways to save it."""

    def __init__(self) -> None:
        self.booster = Booster(plugin=HybridParallelPlugin())
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)])
        parts = self.booster.boost(model, torch.optim.AdamW(model.parameters()))
        self.model, self.optimizer = parts.model, parts.optimizer
        self.optimizer.backward(self.model(torch.randn(8, WIDTH)).square().mean())
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.unwrap().state_dict()}

    def first_alone(self, path: Path) -> None:
        evenly = rank_shares._evenly
        rank_shares._evenly = lambda *_: {}
        try:
            self.booster.save(path, step=1)
        finally:
            rank_shares._evenly = evenly

    def torch_save(self, path: Path) -> None:
        if dist.get_rank() == 0:
            path.mkdir()
            with (path / "state.pt").open("wb") as file:
                torch.save(self.state(), file)
                file.flush()
                os.fsync(file.fileno())

    def variants(self) -> dict[str, Callable[[Path], Any]]:
        return {
            "each its part": lambda path: self.booster.save(path, step=1),
            "the first alone": self.first_alone,
            "DCP": lambda path: dcp.save(self.state(), checkpoint_id=path),
            "torch.save": self.torch_save,
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", help="where to write; default: the folder for temporary files")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    launch_from_torch(seed=0)
    shared: list[Any] = [tempfile.mkdtemp(dir=args.folder) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared, 0)
    job, folder, order = Replicas(), Path(shared[0]), random.Random(0)
    times: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        names = list(job.variants())
        order.shuffle(names)
        for name in names:
            dist.barrier()
            start = time.perf_counter()
            job.variants()[name](folder / name)
            dist.barrier()
            times.setdefault(name, []).append(time.perf_counter() - start)
            if dist.get_rank() == 0:
                shutil.rmtree(folder / name)
    if dist.get_rank() == 0:
        first = statistics.median(times["each its part"])
        for name in job.variants():
            median = statistics.median(times[name])
            print(f"{name:15} {median:.3f} s {288 / median:5.0f} MiB/s   each its part / it {first / median:.2f}")
        shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
