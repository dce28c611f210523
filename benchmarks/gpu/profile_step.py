"""What a device does during a step: the share of time in which it computes, and the longest times in which it waits.

    PYTHONPATH=.:plugins python benchmarks/gpu/profile_step.py --trace step.json

ViT-L/16 in fp16, micro-batches of 4 and of 32 images. The aim at 32: busy for 0.9 of a step. ``--device cpu --tiny``
looks at the CPU's operations instead, to show that this script works.
"""

import argparse
from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from jobs import Measure, add_arguments, run_cases
from loops import Hybridpp, Job
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

AIM = 0.9
NUM_GAPS = 5


class Interval(NamedTuple):
    """A time in which the device works, in microseconds."""

    start: float
    end: float
    name: str


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Intervals without overlaps, in order; each has the name of its first part."""
    result: list[Interval] = []
    for one in sorted(intervals):
        if result and one.start <= result[-1].end:
            result[-1] = result[-1]._replace(end=max(one.end, result[-1].end))
        else:
            result.append(one)
    return result


def summary(intervals: Iterable[Interval]) -> dict[str, Any]:
    """Share of busy time between the first and the last interval, and the longest gaps with what follows them."""
    busy = merged(intervals)
    span = busy[-1].end - busy[0].start
    gaps = sorted(((late.start - early.end, late.name) for early, late in pairwise(busy)), reverse=True)
    return {
        "busy": round(sum(one.end - one.start for one in busy) / span, 4) if span else 1.0,
        "step (ms)": round(span / 1e3, 3),
        "gaps (ms)": [[round(length / 1e3, 4), name] for length, name in gaps[:NUM_GAPS]],
    }


def traced(job: Job, path: str | None) -> list[Interval]:
    """What runs on the device in a step, the third."""
    on_cuda = job.device == "cuda"
    ours = Hybridpp.create(job, "cpu")
    for _ in range(2):
        ours.step()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities) as recorded:
        ours.step()
        if on_cuda:
            torch.cuda.synchronize()
    if path is not None:
        recorded.export_chrome_trace(path)
    kind = DeviceType.CUDA if on_cuda else DeviceType.CPU
    # Annotations of code (that of an optimizer's step) span the time of all its kernels, and what lies between.
    events = [event for event in recorded.events() if event.device_type == kind and not event.is_user_annotation]
    return [Interval(event.time_range.start, event.time_range.end, event.name[:80]) for event in events]


def profiled(job: Job, samples: int, path: str | None) -> dict[str, Any]:
    """How busy the device is in a step with micro-batches of so many images, and whether that reaches the aim."""
    found = summary(traced(job, path))
    aim = {} if samples < 32 else {"aim": AIM, "reached": found["busy"] >= AIM}
    return found | aim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, two micro-batches of 1 and 2 images")
    parser.add_argument("--trace", help="file for the trace of the last case, for a browser")
    args = parser.parse_args()
    size, count = ("tiny", 2) if args.tiny else ("large", 4)
    cases: dict[str, Measure] = {}
    for samples in (1, 2) if args.tiny else (4, 32):
        job = Job(size=size, num_samples=samples * count, num_microbatches=count, device=args.device)
        cases[f"micro-batches of {samples}"] = partial(profiled, job, samples, args.trace)
    run_cases("profile", cases, args)


if __name__ == "__main__":
    main()
