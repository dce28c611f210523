"""Peak of device memory by the number of micro-batches, ViT-L/16 in fp16, micro-batches of equal size.

    PYTHONPATH=.:plugins python benchmarks/gpu/memory.py
    PYTHONPATH=.:plugins python benchmarks/gpu/memory.py --ranks 2 --schedules 1f1b zb-h1 zb-v

The second is a pipeline of two ranks that share the device: what one sends the other travels through host memory.
The aim: under every schedule but GPipe the peak does not depend on the number of micro-batches. A line of JSON per
case. ``--tiny --device cpu`` only shows that it runs.
"""

import argparse
import gc
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from jobs import add_arguments, run_cases
from loops import SIZES, Hybridpp, Job

from hybridpp import launch_from_torch


def peak_and_time(job: Job, pp_size: int, schedule: str) -> tuple[float, float]:
    """Peak in MiB above what was there before, and milliseconds of a step; of this rank."""
    on_cuda = job.device == "cuda"
    gc.collect()
    before = torch.cuda.memory_allocated() if on_cuda else 0
    # The batch on the host: a micro-batch goes to the device when it is its turn.
    ours = Hybridpp.create(job, "cpu", pp_size=pp_size, schedule=schedule)
    for _ in range(2):
        ours.step()
    if on_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    ours.step()
    if on_cuda:
        torch.cuda.synchronize()
    took = 1e3 * (time.perf_counter() - start)
    return (torch.cuda.max_memory_allocated() - before if on_cuda else 0) / 2**20, took


def of_all_ranks(job: Job, pp_size: int, schedule: str) -> dict[str, Any]:
    """Peaks by rank, and the longest time. Collective: all ranks."""
    mine = peak_and_time(job, pp_size, schedule)
    rows = [mine] * pp_size
    if pp_size > 1:
        dist.all_gather_object(rows, mine)
    return {"peak by rank (MiB)": [round(peak) for peak, _ in rows], "step (ms)": round(max(took for _, took in rows))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, 2 and 4 micro-batches")
    parser.add_argument("--size", choices=list(SIZES), default="large")
    parser.add_argument("--ranks", type=int, default=1, help="stages (default: %(default)s)")
    parser.add_argument("--schedules", nargs="+", default=["1f1b"])
    parser.add_argument("--samples", type=int, default=4, help="of a micro-batch (default: %(default)s)")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 16, 64])
    args = parser.parse_args()
    if args.tiny:
        args.size, args.samples, args.microbatches = "tiny", 2, [2, 4]
    if dist.is_torchelastic_launched():
        launch_from_torch()
    cases = {}
    for schedule in args.schedules:
        for count in args.microbatches:
            job = Job(size=args.size, num_samples=args.samples * count, num_microbatches=count, device=args.device)
            cases[f"ranks: {args.ranks}, {schedule}, {count} micro-batches"] = partial(
                of_all_ranks, job, args.ranks, schedule
            )
    run_cases("memory", cases, args, args.ranks, print_here=not dist.is_initialized() or dist.get_rank() == 0)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
