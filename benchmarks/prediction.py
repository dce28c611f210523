"""How well a simulation, fed with the times of a recorded run, foretells how long a step takes.

    OMP_NUM_THREADS=1 PYTHONPATH=.:plugins torchrun --standalone --nproc-per-node 2 benchmarks/prediction.py

For each schedule, steps of a ViT's training are recorded. What simulations make of every second one is compared with
the mean of the others: one in which every action takes its mean time, and the mean of 100 in which each takes a time
that was measured, drawn at random.
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
        print("| hidden | schedule | measured (ms) | mean times | off by | drawn times | off by | idle | idle, drawn |")
        print("|--:|---|--:|--:|--:|--:|--:|--:|--:|", flush=True)
    for hidden in args.hidden:
        for schedule in ("1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"):
            steps = recorded_steps(hidden, schedule, args.steps)
            if dist.get_rank() == 0:
                print(f"| {hidden} | {schedule} | {compare(steps, schedule)} |", flush=True)
    dist.destroy_process_group()


def compare(steps: list[Timeline], schedule: str) -> str:
    """Cells of the table."""
    programs = make_schedule(schedule, dist.get_world_size(), NUM_MICROBATCHES)
    num_stages = 1 + max(action.stage for program in programs for action in program)
    others = steps[1::2]
    fed = joined(steps[::2])
    means_ms = simulate(programs, Costs.from_timeline(fed, num_stages)).timeline.makespan_ms
    draws = simulate_draws(programs, fed)
    drawn_ms = statistics.fmean(draw.timeline.makespan_ms for draw in draws)
    measured_ms = statistics.fmean(step.makespan_ms for step in others)
    idle, drawn_idle = (statistics.fmean(each.idle_share for each in runs) for runs in (others, draws))
    return " | ".join(
        [
            f"{measured_ms:.1f}",
            *(f"{ms:.1f} | {100 * (ms / measured_ms - 1):+.1f} %" for ms in (means_ms, drawn_ms)),
            *(f"{100 * share:.1f} %" for share in (idle, drawn_idle)),
        ]
    )


if __name__ == "__main__":
    main()
