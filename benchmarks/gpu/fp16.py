"""ViT-B/16 and ViT-L/16 in fp16 on one CUDA device, beside two plain loops: time, memory, host waits.

    PYTHONPATH=.:plugins python benchmarks/gpu/fp16.py

The aims: a step takes at most 2 % longer than with torch.amp, and no longer than in a loop with fp16 weights; its peak
of memory is not above that with torch.amp; the host waits for the device once. Contestants take turns, several steps
each (a loop that never waits starts the next step early); medians over the rounds. Memory is measured in a process for
each contestant. A line of JSON per case, each within a time limit. ``--tiny --device cpu`` only shows that it runs.
"""

import argparse
import statistics
import time
import warnings
from functools import partial
from typing import Any

import torch
from jobs import Measure, add_arguments, run_cases
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


def peak(name: str, job: Job) -> dict[str, Any]:
    """Most memory that tensors take in a step, with nothing else on the device."""
    on_cuda = job.device == "cuda"
    before = torch.cuda.memory_allocated() if on_cuda else 0
    step = CONTESTANTS[name](job)
    for _ in range(WARM_UP):
        step()
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    step()
    return {"peak (MiB)": round((torch.cuda.max_memory_allocated() - before) / 2**20) if on_cuda else None}


def compare(job: Job, num_rounds: int, num_steps: int) -> dict[str, Any]:
    """Milliseconds of a step of each contestant, their ratios to this library's, and host waits."""
    on_cuda = job.device == "cuda"
    steps = {name: make(job) for name, make in CONTESTANTS.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(WARM_UP + num_rounds):
        for name, step in steps.items():
            times[name].append(milliseconds(step, num_steps, on_cuda))
    medians = {name: statistics.median(values[WARM_UP:]) for name, values in times.items()}
    ours = medians["hybridpp"]
    numbers: dict[str, Any] = {f"{name} (ms)": round(median, 2) for name, median in medians.items()}
    numbers |= {f"hybridpp / {name}": round(ours / medians[name], 3) for name in list(CONTESTANTS)[1:]}
    numbers |= {f"host waits of {name}": host_waits(step) if on_cuda else None for name, step in steps.items()}
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, two rounds of one step")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["base", "large"])
    parser.add_argument("--batch", type=int, default=128, help="(default: %(default)s)")
    parser.add_argument("--microbatches", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=6, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="of a contestant's turn (default: %(default)s)")
    args = parser.parse_args()
    if args.tiny:
        args.sizes, args.batch, args.rounds, args.steps = ["tiny"], 8, 2, 1
    cases: dict[str, Measure] = {}
    for size in args.sizes:
        job = Job(size=size, num_samples=args.batch, num_microbatches=args.microbatches, device=args.device)
        cases[f"{size}, time"] = partial(compare, job, args.rounds, args.steps)
        for name in CONTESTANTS:
            cases[f"{size}, memory, {name}"] = partial(peak, name, job)
    run_cases("fp16", cases, args)


if __name__ == "__main__":
    main()
