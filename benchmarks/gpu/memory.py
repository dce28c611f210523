"""Peak of device memory by the number of micro-batches, ViT-L/16 in fp16, micro-batches of equal size.

    PYTHONPATH=.:plugins python benchmarks/gpu/memory.py
    PYTHONPATH=.:plugins torchrun --standalone --nproc-per-node 2 benchmarks/gpu/memory.py --schedules 1f1b zb-h1 zb-v

The second is a pipeline of two ranks that share the device: what one sends the other travels through host memory.
The aim: under every schedule but GPipe the peak does not depend on the number of micro-batches. ``--size tiny --device
cpu`` only shows that it runs.
"""

import argparse
import gc
import time

import torch
import torch.distributed as dist
from loops import SIZES, Hybridpp, Job

from hybridpp import DistCoordinator, launch_from_torch


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="(default: %(default)s)")
    parser.add_argument("--size", choices=list(SIZES), default="large")
    parser.add_argument("--schedules", nargs="+", default=["1f1b"])
    parser.add_argument("--samples", type=int, default=4, help="of a micro-batch (default: %(default)s)")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 16, 64])
    args = parser.parse_args()
    if dist.is_torchelastic_launched():
        launch_from_torch()
    coordinator = DistCoordinator()
    num_ranks = coordinator.world_size
    peaks = " | ".join(f"peak of rank {rank} (MiB)" for rank in range(num_ranks))
    coordinator.print_on_master(
        f"| schedule | micro-batches | {peaks} | step (ms) |\n|---|--:|{'--:|' * num_ranks}--:|"
    )
    for schedule in args.schedules:
        for count in args.microbatches:
            job = Job(size=args.size, num_samples=args.samples * count, num_microbatches=count, device=args.device)
            mine = peak_and_time(job, num_ranks, schedule)
            rows = [mine] * num_ranks
            if num_ranks > 1:
                dist.all_gather_object(rows, mine)
            cells = " | ".join(f"{peak:.0f}" for peak, _ in rows)
            coordinator.print_on_master(f"| {schedule} | {count} | {cells} | {max(took for _, took in rows):.0f} |")
    coordinator.destroy()


if __name__ == "__main__":
    main()
