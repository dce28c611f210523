"""The benefit of shared memory between ranks of one host over gloo's messages: a step of two ranks with and without.

    OMP_NUM_THREADS=1 PYTHONPATH=.:plugins torchrun --standalone --nproc-per-node 2 benchmarks/shared_memory.py

A step of ``execute_pipeline`` (forward and backward) of a ViT (12 layers, 65 tokens, fp32), gloo, one thread per rank:
its layers sharded over two ranks (6 heads, batch of 4), and cut into two stages (1F1B, 8 micro-batches of 4). Both
settings are in one run, each with its own groups. Every round runs each once, in alternating order; ratios are taken
round by round. A model's position in memory changes its speed by up to 5 %, so everything is built several times.
"""

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from baselines import StepFunction, hybridpp
from tensor_parallel import NUM_SAMPLES, pipeline
from vit import make_batch

from hybridpp import launch_from_torch
from hybridpp.cluster.torch_world import TorchWorld
from hybridpp.cluster.world import override

MICROBATCH = 4
Seconds = dict[bool, list[float]]


def divided(hidden: int) -> StepFunction:
    """tp=2."""
    return pipeline(hidden, make_batch(NUM_SAMPLES))


def staged(hidden: int, num_microbatches: int) -> StepFunction:
    """pp=2."""
    return hybridpp(hidden, make_batch(MICROBATCH * num_microbatches), num_microbatches, "1f1b")


def both(worlds: dict[bool, TorchWorld], make: Callable[[], StepFunction]) -> dict[bool, StepFunction]:
    """The same step with shared memory and without."""
    steps = {}
    for shared, world in worlds.items():
        token = override.set(world)
        group = world.split([[0, 1]])
        assert group is not None
        assert group.overlaps != shared, "this host offers no shared memory, or it could not be had"
        steps[shared] = make()
        override.reset(token)
    return steps


def measure(steps: dict[bool, StepFunction], rounds: int) -> Seconds:
    """Seconds of every step; the first two rounds are left out."""
    seconds: Seconds = {shared: [] for shared in steps}
    for number in range(rounds + 2):
        for shared in sorted(steps, reverse=number % 2 == 0):
            dist.barrier()
            start = time.perf_counter()
            steps[shared]()
            dist.barrier()
            seconds[shared].append(time.perf_counter() - start)
    return {shared: times[2:] for shared, times in seconds.items()}


def row(name: str, hidden: int, seconds: Seconds) -> str:
    """Medians, and quartiles of the ratios."""
    shared, gloo = seconds[True], seconds[False]
    low, middle, high = statistics.quantiles((a / b for a, b in zip(shared, gloo, strict=True)), n=4)
    medians = [statistics.median(times) * 1e3 for times in (shared, gloo)]
    return f"| {name} | {hidden} | {medians[0]:.1f} | {medians[1]:.1f} | {middle:.3f} | {low:.3f} to {high:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[192, 384])
    parser.add_argument("--microbatches", type=int, default=8, help="of the step in two stages")
    parser.add_argument("--rounds", type=int, default=10, help="with each of what is built")
    parser.add_argument("--builds", type=int, default=4, help="how often everything is built anew")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    launch_from_torch(seed=0)
    worlds = {shared: TorchWorld(shared_memory=shared) for shared in (True, False)}
    is_first = dist.get_rank() == 0
    if is_first:
        print("| step | hidden | shared memory (ms) | gloo (ms) | ratio, median | quartiles |")
        print("|---|--:|--:|--:|--:|--:|", flush=True)
    for hidden in args.hidden:
        makers = {"tp=2": lambda h=hidden: divided(h), "pp=2": lambda h=hidden: staged(h, args.microbatches)}
        for name, make in makers.items():
            seconds: Seconds = {True: [], False: []}
            for _ in range(args.builds):
                for shared, times in measure(both(worlds, make), args.rounds).items():
                    seconds[shared] += times
            if is_first:
                print(row(name, hidden, seconds), flush=True)
    if is_first:
        print(f"\n{args.builds} x {args.rounds} rounds, load {os.getloadavg()[0]:.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
