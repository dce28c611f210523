"""Kernel launches per action of ViT-L/16 in fp16 on one CUDA device, beside an fp16 loop by hand.

    PYTHONPATH=.:plugins python benchmarks/gpu/launches.py

A line of JSON per contestant. ``--tiny --device cpu`` only shows that it runs: a CPU launches nothing.
"""

import argparse
from collections import defaultdict
from functools import partial
from typing import Any

from jobs import add_arguments, run_cases
from loops import SIZES, Hybridpp, Job, PipelineStep, by_hand
from torch.profiler import ProfilerActivity, profile, record_function

from hybridpp.schedule import Action

_MARK = "hybridpp mark: "
# cudaLaunchKernelExC and cuLaunchKernelEx among them: matrix products on Hopper are launched so.
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel")


def mark(text: str) -> None:
    """Put a word between the launches that the profiler writes down."""
    with record_function(_MARK + text):
        pass


class Marks:
    """A recorder of actions that marks their starts and ends for the profiler."""

    def start(self) -> None:
        mark("start")

    def end(self, action: Action) -> None:
        mark(str(action.kind))

    def mark(self, phase: str) -> None:
        """Phases of a step are not marked."""


def launches(step: PipelineStep, device: str) -> dict[str, list[int]]:
    """Kernels that a step starts, by kind of action; under "step", what is outside of all actions."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities, acc_events=True) as profiler:
        step()
    found: defaultdict[str, list[int]] = defaultdict(list)
    outside = count = 0
    for event in sorted(profiler.events(), key=lambda event: event.time_range.start):
        if event.name.startswith(_LAUNCHES):
            count += 1
        elif event.name == _MARK + "start":
            outside, count = outside + count, 0
        elif event.name.startswith(_MARK):
            found[event.name.removeprefix(_MARK)].append(count)
            count = 0
    found["step"] = [outside + count]
    return found


def of_hybridpp(job: Job) -> dict[str, Any]:
    """Launches of this library's third step."""
    ours = Hybridpp.create(job, job.device)
    for _ in range(2):
        ours.step()
    with ours.booster.record_timeline(ours.model) as recording:
        times, recording.recorder = recording.recorder, Marks()
        found = _numbers(launches(ours.step, job.device))
        recording.recorder = times
    return found


def of_the_loop(job: Job) -> dict[str, Any]:
    """Launches of the third step of the loop."""
    step = by_hand(job, mark)
    for _ in range(2):
        step()
    return _numbers(launches(step, job.device))


def _numbers(counts: dict[str, list[int]]) -> dict[str, Any]:
    titles = {"forward (F)": "F", "backward (B)": "B", "rest of the step": "step"}
    return {title: counts[kind] for title, kind in titles.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--tiny", action="store_true", help="a tiny model")
    parser.add_argument("--size", choices=list(SIZES), default="large")
    parser.add_argument("--microbatches", type=int, default=4, help="(default: %(default)s)")
    args = parser.parse_args()
    size, num_samples = ("tiny", 8) if args.tiny else (args.size, 64)
    job = Job(size=size, num_samples=num_samples, num_microbatches=args.microbatches, device=args.device)
    cases = {"hybridpp": partial(of_hybridpp, job), "fp16 by hand": partial(of_the_loop, job)}
    run_cases("launches", cases, args)


if __name__ == "__main__":
    main()
