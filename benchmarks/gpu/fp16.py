"""ViT-B/16 and ViT-L/16 in fp16 on one CUDA device, beside two plain loops: time, memory, host waits.

    PYTHONPATH=.:plugins python benchmarks/gpu/fp16.py

The aims: a step takes at most 2 % longer than with torch.amp, and no longer than in a loop with fp16 weights; its peak
of memory is not above that with torch.amp; the host waits for the device once. Contestants take turns, several steps
each (a loop that never waits starts the next step early); medians over the rounds. ``--sizes tiny --device cpu`` only
shows that it runs.
"""

import argparse
import gc
import statistics
import time
import warnings

import torch
from loops import SIZES, Job, PipelineStep, by_hand, with_amp, with_hybridpp

CONTESTANTS = {"hybridpp": with_hybridpp, "torch.amp": with_amp, "fp16 by hand": by_hand}
WARM_UP = 2


def milliseconds(step: PipelineStep, num_steps: int, on_cuda: bool) -> float:
    """Of one of several steps, the work of the device included."""
    if on_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    if on_cuda:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / num_steps


def host_waits(step: PipelineStep) -> int:
    """How often the host waits for the device in a step, as far as torch sees it."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing CUDA operation" in str(warning.message) for warning in said)


def free_device() -> None:
    """Give back what nobody holds any more; a model lies in cycles."""
    gc.collect()
    torch.cuda.empty_cache()


def peak_mib(name: str, job: Job) -> float:
    """Most memory that tensors take in a step, with nothing else on the device."""
    free_device()
    before = torch.cuda.memory_allocated()
    step = CONTESTANTS[name](job)
    for _ in range(WARM_UP):
        step()
    torch.cuda.reset_peak_memory_stats()
    step()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def compare(job: Job, num_rounds: int, num_steps: int) -> None:
    """A row for each variant."""
    on_cuda = job.device == "cuda"
    peaks = {name: f"{peak_mib(name, job):.0f}" if on_cuda else "" for name in CONTESTANTS}
    if on_cuda:
        free_device()
    steps = {name: make(job) for name, make in CONTESTANTS.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(WARM_UP + num_rounds):
        for name, step in steps.items():
            times[name].append(milliseconds(step, num_steps, on_cuda))
    medians = {name: statistics.median(values[WARM_UP:]) for name, values in times.items()}
    for name, step in steps.items():
        waits = str(host_waits(step)) if on_cuda else ""
        ratios = " | ".join(f"{medians[other] / medians[name]:.3f}" for other in list(CONTESTANTS)[1:])
        print(f"| {job.size} | {name} | {medians[name]:.2f} | {ratios} | {peaks[name]} | {waits} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="(default: %(default)s)")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["base", "large"])
    parser.add_argument("--batch", type=int, default=128, help="(default: %(default)s)")
    parser.add_argument("--microbatches", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="of a variant's turn (default: %(default)s)")
    args = parser.parse_args()
    titles = " | ".join(f"{other} / this" for other in list(CONTESTANTS)[1:])
    print(f"| ViT | | step (ms) | {titles} | peak (MiB) | host waits |\n|---|---|--:|--:|--:|--:|--:|")
    for size in args.sizes:
        job = Job(size=size, num_samples=args.batch, num_microbatches=args.microbatches, device=args.device)
        compare(job, args.rounds, args.steps)


if __name__ == "__main__":
    main()
