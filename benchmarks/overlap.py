"""The benefit of computing weight gradients while input gradients are all-reduced, and of saving shards of inputs.

    OMP_NUM_THREADS=1 PYTHONPATH=.:plugins torchrun --standalone --nproc-per-node 2 benchmarks/overlap.py

The ViT of ``tensor_parallel.py`` in ``execute_pipeline``, tp=2 over gloo, four micro-batches of 4. Every round runs
each variant once, in turn. "Put off" computes column layers' weight gradients while their input's gradient is
all-reduced, also where ranks of one host run the all-reduce themselves. "Keeping wholes" saves the gathered inputs of
column layers for the backward pass. All variants compute the same numbers.
"""

import argparse
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from baselines import StepFunction
from tensor_parallel import NUM_SAMPLES, lower_quartile, measure, pipeline
from torch import Tensor
from vit import make_batch

from hybridpp import launch_from_torch
from hybridpp.cluster.torch_world import TorchGroup
from hybridpp.tensor_parallel import TensorParallelContext

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
    own = TensorParallelContext.saved_shard_of

    def nothing(context: TensorParallelContext, x: Tensor) -> None:
        return None

    def run() -> None:
        TensorParallelContext.saved_shard_of = nothing  # type: ignore[method-assign]
        try:
            step()
        finally:
            TensorParallelContext.saved_shard_of = own  # type: ignore[method-assign]

    return run


def variants(hidden: int) -> dict[str, StepFunction]:
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
        quartiles = {name: lower_quartile(times) for name, times in measure(variants(hidden), args.rounds).items()}
        if dist.get_rank() == 0:
            print(f"\nhidden {hidden}, {args.rounds} rounds, load {os.getloadavg()[0]:.1f}\n")
            print("| | lower quartile (ms) | of the first |\n|---|--:|--:|")
            for name, quartile in quartiles.items():
                ratio = quartile / quartiles["whole sequences"]
                print(f"| {name} | {quartile * 1e3:.1f} | {ratio:.3f} |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
