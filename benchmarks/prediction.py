"""The accuracy of a simulation that predicts step times from the action times of a recorded run.

    OMP_NUM_THREADS=1 PYTHONPATH=.:plugins torchrun --standalone --nproc-per-node 2 benchmarks/prediction.py

For each schedule, steps of a ViT's training are recorded. Every second step is predicted from its two neighbours, in
two
ways: by a step in which every action takes its mean time, and by the mean of 100 steps in which each action takes a
random measured time. Medians over the steps, because on a busy host some take twice the time.
"""

import argparse
import statistics
import warnings

import torch
import torch.distributed as dist
from torch import nn
from vit import make_batch, make_vit

from hybridpp import Booster, HybridParallelPlugin, launch_from_torch
from hybridpp.schedule import make_schedule
from hybridpp.simulate import Costs, simulate, simulate_draws
from hybridpp.timeline import Timeline

MICROBATCH, NUM_MICROBATCHES = 4, 8


def recorded_steps(hidden: int, schedule: str, num_steps: int) -> list[Timeline]:
    """The timeline of each step. Collective: all ranks."""
    batch = make_batch(MICROBATCH * NUM_MICROBATCHES)
    plugin = HybridParallelPlugin(
        tp_size=1,
        pp_size=dist.get_world_size(),
        num_microbatches=NUM_MICROBATCHES,
        precision="fp32",
        schedule=schedule,
    )
    model: nn.Module = make_vit(hidden)
    booster = Booster(plugin=plugin)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    parts = booster.boost(model, optimizer, lambda outputs, inputs: outputs.loss, sample=batch)
    timelines = []
    for _ in range(num_steps + 2):
        with booster.record_timeline(parts.model) as recording:
            booster.execute_pipeline(iter([batch]), parts.model, parts.criterion, parts.optimizer)
        timelines.append(recording.timeline)
    return timelines[2:]


def joined(timelines: list[Timeline]) -> Timeline:
    """All steps, one after the other."""
    return Timeline(tuple(span for timeline in timelines for span in timeline.spans))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[192, 384])
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    launch_from_torch(seed=0)
    if dist.get_rank() == 0:
        print("| hidden | schedule | measured (ms) | by means off by | by draws off by | idle | idle of draws |")
        print("|--:|---|--:|--:|--:|--:|--:|", flush=True)
    for hidden in args.hidden:
        for schedule in ("1f1b", "interleaved", "zb-h1", "eager-1f1b", "zb-v"):
            steps = recorded_steps(hidden, schedule, args.steps)
            if dist.get_rank() == 0:
                print(f"| {hidden} | {schedule} | {compare(steps, schedule)} |", flush=True)
    dist.destroy_process_group()


def compare(steps: list[Timeline], schedule: str) -> str:
    """Cells of the table."""
    programs = make_schedule(schedule, dist.get_world_size(), NUM_MICROBATCHES)
    num_stages = 1 + max(action.stage for program in programs for action in program)
    rows = []
    for before, step, after in zip(steps[::2], steps[1::2], steps[2::2], strict=False):
        fed = joined([before, after])
        means = simulate(programs, Costs.from_timeline(fed, num_stages)).timeline
        draws = simulate_draws(programs, fed)
        drawn_ms = statistics.fmean(draw.timeline.makespan_ms for draw in draws)
        drawn_idle = statistics.fmean(draw.idle_share for draw in draws)
        off = [100 * (ms / step.makespan_ms - 1) for ms in (means.makespan_ms, drawn_ms)]
        rows.append((step.makespan_ms, *off, 100 * step.idle_share, 100 * drawn_idle))
    measured_ms, off_means, off_drawn, idle, drawn_idle = map(statistics.median, zip(*rows, strict=True))
    return f"{measured_ms:.1f} | {off_means:+.1f} % | {off_drawn:+.1f} % | {idle:.1f} % | {drawn_idle:.1f} %"


if __name__ == "__main__":
    main()
