"""Kernel launches per action of ViT-L/16 in fp16 on one CUDA device, beside an fp16 loop by hand.

    PYTHONPATH=.:plugins python benchmarks/gpu/launches.py

``--size tiny --device cpu`` only shows that it runs: a CPU launches nothing.
"""

import argparse
from collections import defaultdict

from loops import SIZES, Hybridpp, Job, PipelineStep, by_hand
from torch.profiler import ProfilerActivity, profile, record_function

from hybridpp.schedule import Action
from hybridpp.timeline import Span

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

    def spans(self) -> list[Span]:
        """No times."""
        return []


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="(default: %(default)s)")
    parser.add_argument("--size", choices=list(SIZES), default="large")
    parser.add_argument("--microbatches", type=int, default=4, help="(default: %(default)s)")
    args = parser.parse_args()
    job = Job(size=args.size, num_samples=64, num_microbatches=args.microbatches, device=args.device)
    ours = Hybridpp.create(job, job.device)
    plain = by_hand(job, mark)
    for step in (ours.step, plain):
        step()
        step()
    with ours.booster.record_timeline(ours.model) as recording:
        recording.recorder = Marks()
        rows = {"hybridpp": launches(ours.step, args.device)}
    rows["fp16 by hand"] = launches(plain, args.device)
    print("| | forward (F) | backward (B) | rest of the step |\n|---|--:|--:|--:|")
    for name, counts in rows.items():
        cells = [" ".join(map(str, counts[kind])) for kind in ("F", "B", "step")]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
