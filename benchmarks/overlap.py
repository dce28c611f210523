"""What it is worth to compute weight gradients while activations' gradients are being summed, and to keep shards.

    OMP_NUM_THREADS=1 PYTHONPATH=.:plugins torchrun --standalone --nproc-per-node 2 benchmarks/overlap.py

The ViT of ``tensor_parallel.py`` in ``execute_pipeline``, tp=2 over gloo, four micro-batches of 4. Every round runs
each contestant once, in turn. "Put off" leaves column layers' weight gradients until their input's is being summed,
also where ranks of one host carry sums themselves. "Keeping wholes" keeps the joined inputs of column layers until the
backward pass. The numbers are the same.
"""

import argparse
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def put_off() -> Iterator[None]:
    """Models boosted inside overlap weight gradients with sums, whatever carries those."""
    own = TorchGroup.__init__

    def init(group: TorchGroup, *args: Any) -> None:
        own(group, *args)
        group.overlaps = True

    TorchGroup.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        TorchGroup.__init__ = own  # type: ignore[method-assign]


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
    with put_off():
        later = [pipeline(hidden, batch, shards, NUM_MICROBATCHES) for shards in (False, True)]
    return {
        "whole sequences": whole,
        "whole sequences, put off": later[0],
        "shards": shards,
        "shards, put off": later[1],
        "shards, keeping wholes": keeping_wholes(shards),
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
