"""Whether a step's memory grows with the number of micro-batches.

    OMP_NUM_THREADS=1 PYTHONPATH=.:plugins python benchmarks/memory_in_microbatches.py

Two gloo ranks train a small GPT-2 (token ids in, so that the batch itself is next to nothing) on micro-batches of 2.
Each row is a separate process group: peak resident memory of each rank, since the launch. Every row runs the same
number of micro-batches, in more or fewer steps: the size of the allocator's free lists varies randomly from
micro-batch to micro-batch, so the maximum over more of them is higher, whatever a step holds.
"""

import argparse
import multiprocessing
import os
import resource
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

from hybridpp import Booster, HybridParallelPlugin

MICROBATCH, LENGTH = 2, 128
TOTAL_MICROBATCHES = 768


def train(rank: int, num_ranks: int, rendezvous: str, schedule: str, num_microbatches: int, queue: Any) -> None:
    """One rank of a job of its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            n_embd=384,
            n_layer=8,
            n_head=6,
            vocab_size=2000,
            n_positions=LENGTH,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
            loss_type="ForCausalLMLoss",
        )
    )
    ids = torch.randint(0, 2000, (MICROBATCH * num_microbatches, LENGTH))
    batch = {"input_ids": ids, "labels": ids}
    plugin = HybridParallelPlugin(
        tp_size=1, pp_size=num_ranks, microbatch_size=MICROBATCH, precision="fp32", schedule=schedule
    )
    booster = Booster(plugin=plugin)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    boosted = booster.boost(model, optimizer, lambda outputs, inputs: outputs.loss, sample=batch)
    for _ in range(max(1, TOTAL_MICROBATCHES // num_microbatches)):
        booster.execute_pipeline(iter([batch]), boosted.model, boosted.criterion, boosted.optimizer)
        boosted.optimizer.step()
        boosted.optimizer.zero_grad()
    queue.put((rank, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))
    dist.destroy_process_group()


def peaks_mib(schedule: str, num_microbatches: int, num_ranks: int = 2) -> list[float]:
    """Peak resident memory of every rank."""
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (num_ranks, os.path.join(folder, "store"), schedule, num_microbatches, queue)
        ranks = [context.Process(target=train, args=(rank, *arguments)) for rank in range(num_ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit("a rank failed; see its error above")
    return [peak for _, peak in sorted(queue.get() for _ in ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb-h1", "zb-v", "gpipe"])
    args = parser.parse_args()
    print("| schedule | micro-batches | rank 0 (MiB) | rank 1 (MiB) | against the first |")
    print("|---|--:|--:|--:|--:|")
    for schedule in args.schedules:
        first: list[float] = []
        for num_microbatches in args.microbatches:
            peaks = peaks_mib(schedule, num_microbatches)
            first = first or peaks
            growth = max(peak / base for peak, base in zip(peaks, first, strict=True))
            cells = " | ".join(f"{peak:.0f}" for peak in peaks)
            print(f"| {schedule} | {num_microbatches} | {cells} | {100 * (growth - 1):+.1f} % |", flush=True)


if __name__ == "__main__":
    main()
