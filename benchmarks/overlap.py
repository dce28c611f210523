"""What it is worth to compute weight gradients while activations' gradients are being summed, and to keep shards.

    OMP_NUM_THREADS=1 PYTHONPATH=.:plugins torchrun --standalone --nproc-per-node 2 benchmarks/overlap.py

The ViT of ``tensor_parallel.py`` in ``execute_pipeline``, tp=2 over gloo, four micro-batches of 4. Every round runs
each contestant once, in turn. "Waiting" differs in that every communication is waited for where it is started; the
numbers are the same. "Keeping wholes" keeps the joined inputs of column layers until the backward pass.
"""

import argparse
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from contestants import StepFunction
from tensor_parallel import NUM_SAMPLES, lower_quartile, measure, pipeline
from torch import Tensor
from vit import make_batch

from hybridpp import launch_from_torch
from hybridpp.cluster.torch_world import TorchGroup
from hybridpp.tensor_parallel import Crossings

NUM_MICROBATCHES = 4
STARTING = ("all_reduce", "start_all_gather", "start_reduce_scatter")


class Over:
    """A communication that was waited for."""

    def __init__(self, result: Any):
        self._result = result

    def wait(self) -> Any:
        return self._result


def waiting(step: StepFunction) -> StepFunction:
    """The same step, whose communications are over when they have been started."""
    own: dict[str, Callable[..., Any]] = {name: getattr(TorchGroup, name) for name in STARTING}

    def at_once(name: str) -> Callable[..., Over]:
        return lambda group, tensor, *others: Over(own[name](group, tensor, *others).wait())

    def run() -> None:
        for name in STARTING:
            setattr(TorchGroup, name, at_once(name))
        try:
            step()
        finally:
            for name in STARTING:
                setattr(TorchGroup, name, own[name])

    return run


def keeping_wholes(step: StepFunction) -> StepFunction:
    """The same step, in which column layers keep their joined inputs."""
    own = Crossings.keep

    def nothing(crossings: Crossings, x: Tensor) -> None:
        return None

    def run() -> None:
        Crossings.keep = nothing  # type: ignore[method-assign]
        try:
            step()
        finally:
            Crossings.keep = own  # type: ignore[method-assign]

    return run


def contestants(hidden: int) -> dict[str, StepFunction]:
    batch = make_batch(NUM_SAMPLES * NUM_MICROBATCHES)
    whole, shards = (pipeline(hidden, batch, shards, NUM_MICROBATCHES) for shards in (False, True))
    return {
        "whole sequences": whole,
        "whole sequences, waiting": waiting(whole),
        "shards": shards,
        "shards, waiting": waiting(shards),
        "shards, keeping wholes": keeping_wholes(shards),
        "shards, keeping wholes, waiting": keeping_wholes(waiting(shards)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[192, 384])
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    launch_from_torch(seed=0)
    for hidden in args.hidden:
        quartiles = {name: lower_quartile(times) for name, times in measure(contestants(hidden), args.rounds).items()}
        if dist.get_rank() == 0:
            print(f"\nhidden {hidden}, {args.rounds} rounds, load {os.getloadavg()[0]:.1f}\n")
            print("| | lower quartile (ms) | of the first |\n|---|--:|--:|")
            for name, quartile in quartiles.items():
                ratio = quartile / quartiles["whole sequences"]
                print(f"| {name} | {quartile * 1e3:.1f} | {ratio:.3f} |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
