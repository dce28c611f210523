"""The efficiency of each schedule on two ranks, compared with other implementations.

    OMP_NUM_THREADS=1 PYTHONPATH=.:plugins python benchmarks/schedules.py

Forward and backward of a ViT (12 layers, 65 tokens, fp32, micro-batches of 4), gloo, one thread per rank. Every round
runs each variant once, and one process alone, in a new random order; medians over the rounds. Efficiency is the time of
one process over (ranks x the pipeline's time), of the medians and of the lower quartiles. The last row is the upper
limit of any schedule: each rank does all the work at once. With ``--steps N``, N steps run in a row in each round,
without a barrier between them; times are of one step.

A model's position in memory changes its speed by up to 5 %, for as long as it exists. So everything is built several
times, each time in new processes (a gloo group has a thread that wakes a hundred times per second, even if its variant
no longer exists), and the second table, this library against torch's schedule of the same name round by round, has that
variation in its quartiles.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from baselines import StepFunction, bare_loop, hybridpp, one_process, torch_pipelining
from vit import make_batch

from hybridpp import launch_from_torch

MICROBATCH, NUM_RANKS = 4, 2
OURS = ("1f1b", "eager-1f1b", "interleaved", "zb-h1", "zb-h2", "interleaved-zb", "zb-v")
ALONE, AT_ONCE = "one process", "one process on each rank"
# Ours of the same name.
TORCHS = {
    "1F1B": "1f1b",
    "Interleaved1F1B": "interleaved",
    "InterleavedZeroBubble": "interleaved-zb",
    "ZBVZeroBubble": "zb-v",
}


def variants(hidden: int, num_microbatches: int, names: list[str]) -> dict[str, StepFunction]:
    """Those whose name contains one of ``names``; all without."""
    batch = make_batch(MICROBATCH * num_microbatches)
    makers = {f"hybridpp {name}": lambda name=name: hybridpp(hidden, batch, num_microbatches, name) for name in OURS}
    makers |= {
        f"torch {name}": lambda name=name: torch_pipelining(hidden, batch, num_microbatches, name) for name in TORCHS
    }
    makers["a bare 1F1B loop"] = lambda: bare_loop(hidden, batch, num_microbatches)
    for name in (ALONE, AT_ONCE):
        makers[name] = lambda: one_process(hidden, batch, num_microbatches)
    chosen = [name for name in makers if name in (ALONE, AT_ONCE) or not names or any(part in name for part in names)]
    return {name: makers[name]() for name in chosen}


def measure(steps: dict[str, StepFunction], rounds: int, order: random.Random, in_a_row: int) -> dict[str, list[float]]:
    """Seconds of a step in every round, by variant; the first round is left out."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name in order.sample(list(steps), len(steps)):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(in_a_row if name != ALONE or dist.get_rank() == 0 else 0):
                steps[name]()
            dist.barrier()
            seconds[name].append((time.perf_counter() - start) / in_a_row)
    return {name: times[1:] for name, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[192, 384])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8])
    parser.add_argument("--rounds", type=int, default=5, help="with each of what is built")
    parser.add_argument("--steps", type=int, default=1, help="in a row, in every round")
    parser.add_argument("--builds", type=int, default=4, help="how often everything is built anew")
    parser.add_argument("--only", nargs="+", default=[], help="variants whose name contains one of these")
    parser.add_argument("--build", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.to is not None:
        run_build(args)
        return
    for hidden in args.hidden:
        for num_microbatches in args.microbatches:
            seconds = builds(hidden, num_microbatches, args)
            sizes = f"hidden {hidden}, {num_microbatches} micro-batches, {args.steps} steps in a row"
            print(f"\n{sizes}, load {os.getloadavg()[0]:.1f}\n")
            print("| | median (ms) | efficiency | of the fastest quarters |\n|---|--:|--:|--:|")
            _table(seconds)
            _against_torch(seconds)


def builds(hidden: int, num_microbatches: int, args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of every step of all builds, by variant."""
    seconds: dict[str, list[float]] = {}
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(NUM_RANKS),
        __file__,
    ]
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder, "seconds.json")
        for build in range(args.builds):
            given = {
                "hidden": hidden,
                "microbatches": num_microbatches,
                "rounds": args.rounds,
                "steps": args.steps,
                "build": build,
                "to": to,
            }
            options = [part for name, value in given.items() for part in (f"--{name}", str(value))]
            subprocess.run([*launcher, *options, *(["--only", *args.only] if args.only else [])], check=True)
            for name, times in json.loads(to.read_text()).items():
                seconds.setdefault(name, []).extend(times)
    return seconds


def run_build(args: argparse.Namespace) -> None:
    """What each rank does; rank 0 writes down the seconds."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    launch_from_torch(seed=0)
    steps = variants(*args.hidden, *args.microbatches, args.only)
    seconds = measure(steps, args.rounds, random.Random(args.build), args.steps)
    if dist.get_rank() == 0:
        args.to.write_text(json.dumps(seconds))
    dist.destroy_process_group()


def _table(seconds: dict[str, list[float]]) -> None:
    alone = seconds[ALONE]
    for name, times in seconds.items():
        # On each rank the whole work is done, so what is left of 1 is what busy ranks take from each other.
        num_ranks = 1 if name == AT_ONCE else NUM_RANKS
        # The fastest quarter tells more of the variants than of what else the machine does.
        shares = [when(alone) / when(times) / num_ranks for when in (statistics.median, _fast)]
        row = f"{shares[0]:.3f} | {shares[1]:.3f}" if times is not alone else " | "
        print(f"| {name} | {statistics.median(times) * 1e3:.1f} | {row} |", flush=True)


def _against_torch(seconds: dict[str, list[float]]) -> None:
    print("\n| torch's time over ours | median | quartiles |\n|---|--:|--:|", flush=True)
    for torchs, ours in TORCHS.items():
        pair = [seconds.get(name) for name in (f"torch {torchs}", f"hybridpp {ours}")]
        if pair[0] and pair[1]:
            low, middle, high = statistics.quantiles((a / b for a, b in zip(pair[0], pair[1], strict=True)), n=4)
            print(f"| {ours} | {middle:.3f} | {low:.3f} to {high:.3f} |", flush=True)


def _fast(times: list[float]) -> float:
    return statistics.quantiles(times, n=4)[0]


if __name__ == "__main__":
    main()
