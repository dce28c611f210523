"""What recording costs a step: steps that are recorded against steps that are not, in turns.

    OMP_NUM_THREADS=1 PYTHONPATH=.:plugins torchrun --standalone --nproc-per-node 2 benchmarks/recording.py

A ViT in two stages; its update is in the step. Gathering what was recorded is not: that is at the end of the block.
"""

import argparse
import statistics
import time
import warnings

import torch
import torch.distributed as dist
from vit import make_batch, make_vit

from hybridpp import Booster, HybridParallelPlugin, launch_from_torch

MICROBATCH, NUM_MICROBATCHES = 4, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 192])
    parser.add_argument("--pairs", type=int, default=20)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    launch_from_torch(seed=0)
    if dist.get_rank() == 0:
        print("| hidden | step (ms) | recorded (ms) | median of the pairs' ratios |\n|--:|--:|--:|--:|", flush=True)
    for hidden in args.hidden:
        row = compare(hidden, args.pairs)
        if dist.get_rank() == 0:
            print(row, flush=True)
    dist.destroy_process_group()


def compare(hidden: int, num_pairs: int) -> str:
    """A row of the table. Collective: all ranks."""
    batch = make_batch(MICROBATCH * NUM_MICROBATCHES)
    plugin = HybridParallelPlugin(tp_size=1, pp_size=dist.get_world_size(), num_microbatches=NUM_MICROBATCHES)
    booster, model = Booster(plugin=plugin), make_vit(hidden)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    parts = booster.boost(model, optimizer, lambda outputs, inputs: outputs.loss, sample=batch)

    def step_ms() -> float:
        dist.barrier()
        started = time.perf_counter()
        booster.execute_pipeline(iter([batch]), parts.model, parts.criterion, parts.optimizer)
        assert parts.optimizer is not None
        parts.optimizer.step()
        dist.barrier()
        return 1e3 * (time.perf_counter() - started)

    def recorded_ms() -> float:
        with booster.record_timeline(parts.model):
            return step_ms()

    for _ in range(2):
        step_ms(), recorded_ms()
    pairs = []
    for number in range(num_pairs):
        if number % 2:
            recorded = recorded_ms()
            pairs.append((step_ms(), recorded))
        else:
            pairs.append((step_ms(), recorded_ms()))
    plain, recorded = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(after / before for before, after in pairs)
    return f"| {hidden} | {plain:.1f} | {recorded:.1f} | {ratio:.3f} |"


if __name__ == "__main__":
    main()
