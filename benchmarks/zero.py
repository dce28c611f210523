"""ZeRO on two replicas against DistributedDataParallel, alone and with ZeroRedundancyOptimizer, and against FSDP2.

    OMP_NUM_THREADS=1 PYTHONPATH=.:plugins python benchmarks/zero.py

A complete step of a ViT (12 layers, 65 tokens, fp32, one batch of 8 per replica) with AdamW, over gloo. Every round
runs each variant once, in a new random order. Everything is built several times, each time in new processes, because a
model's position in memory changes its speed. The ratios are of medians over the rounds of each build.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from baselines import StepFunction
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from vit import make_batch, make_vit

from hybridpp import Booster, HybridParallelPlugin, launch_from_torch

NUM_SAMPLES = 8
LEARNING_RATE = 1e-4


def ddp(hidden: int, batch: dict[str, torch.Tensor], sharded: bool) -> StepFunction:
    """torch's replicas; ``sharded``: with its ZeRO stage 1."""
    model = DistributedDataParallel(make_vit(hidden))
    make: Any = torch.optim.AdamW
    if sharded:
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), make, lr=LEARNING_RATE)
    else:
        optimizer = make(model.parameters(), lr=LEARNING_RATE)

    def step() -> None:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()

    return step


def fsdp(hidden: int, batch: dict[str, torch.Tensor]) -> StepFunction:
    """torch's FSDP2: each block by itself, and the rest."""
    model = make_vit(hidden)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.vit.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step() -> None:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()

    return step


def hybridpp(hidden: int, batch: dict[str, torch.Tensor], zero_stage: int, **options: Any) -> StepFunction:
    """``booster.execute_pipeline`` and ``optimizer.step``."""
    plugin = HybridParallelPlugin(num_microbatches=1, precision="fp32", zero_stage=zero_stage, **options)
    booster, model = Booster(plugin=plugin), make_vit(hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    boosted = booster.boost(model, optimizer, lambda outputs, inputs: outputs.loss, sample=batch)

    def step() -> None:
        booster.execute_pipeline(iter([batch]), boosted.model, boosted.criterion, boosted.optimizer)
        boosted.optimizer.step()

    return step


def measure(hidden: int, rounds: int, only: list[str]) -> dict[str, list[float]]:
    """Milliseconds of each variant in each round, on this rank."""
    whole = make_batch(2 * NUM_SAMPLES)
    batch = {name: tensor.chunk(2)[dist.get_rank()] for name, tensor in whole.items()}
    variants = {
        "DDP": ddp(hidden, batch, sharded=False),
        "DDP + ZeroRedundancyOptimizer": ddp(hidden, batch, sharded=True),
        "hybridpp, zero_stage=0": hybridpp(hidden, batch, 0),
        "hybridpp, zero_stage=1": hybridpp(hidden, batch, 1),
        "hybridpp, zero_stage=2": hybridpp(hidden, batch, 2),
        "FSDP2": fsdp(hidden, batch),
        "hybridpp, zero_stage=3": hybridpp(hidden, batch, 3),
    }
    variants = {name: step for name, step in variants.items() if not only or name in only}
    times: dict[str, list[float]] = {name: [] for name in variants}
    order = random.Random(0)  # the same on all ranks
    for number in range(rounds + 2):
        for name in order.sample(list(variants), len(variants)):
            dist.barrier()
            started = time.perf_counter()
            variants[name]()
            dist.barrier()
            if number >= 2:  # the first ones allocate
                times[name].append(1e3 * (time.perf_counter() - started))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--builds", type=int, default=3)
    parser.add_argument(
        "--only", nargs="*", default=[], help="variants, the first of which the others are compared with"
    )
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if "RANK" in os.environ:
        torch.set_num_threads(1)
        launch_from_torch(seed=0)
        times = measure(args.hidden, args.rounds, args.only)
        if dist.get_rank() == 0:
            print(json.dumps(times))
        return
    medians: dict[str, list[float]] = {}
    for _ in range(args.builds):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        command += ["--hidden", str(args.hidden), "--rounds", str(args.rounds), "--only", *args.only]
        job = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(job.stdout.splitlines()[-1])
        for name, times in found.items():
            medians.setdefault(name, []).append(statistics.median(times))
    print(f"hidden {args.hidden}, {args.rounds} rounds x {args.builds} builds, load {os.getloadavg()[0]:.1f}\n")
    first = (args.only or ["DDP"])[0]
    print(f"| variant | ms | {first}'s time over it, by build |\n|---|--:|--:|")
    for name, values in medians.items():
        ratios = ", ".join(f"{a / b:.3f}" for a, b in zip(medians[first], values, strict=True))
        print(f"| {name} | {statistics.median(values):.0f} | {ratios} |")


if __name__ == "__main__":
    main()
