"""How much of a chunk's gradient reduction the cool-down hides, and whether the simulator foretells the step.

    OMP_NUM_THREADS=1 PYTHONPATH=.:plugins torchrun --standalone --nproc-per-node 4 benchmarks/reduction_overlap.py

Two replicas of two stages with two chunks each (``interleaved``), a ViT of 12 layers, fp32, over gloo. Each rank's
later chunk is complete first: its gradients are reduced while the other chunk still runs backward passes. "Hidden" is
the share of that reduction, from its first bucket's start to its last one's end, before the rank's last action ends.
Every second step is simulated with the mean times of its two neighbours, and ``reduce_ms`` is what a stage's reduction
takes after its last backward pass.
"""

import argparse
import dataclasses
import statistics
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vit import make_batch, make_vit

from hybridpp import Booster, HybridParallelPlugin, launch_from_torch
from hybridpp.schedule import make_schedule
from hybridpp.simulate import Costs, simulate
from hybridpp.timeline import Span, Timeline

MICROBATCH, NUM_MICROBATCHES = 2, 8
NUM_POSITIONS, NUM_STAGES, NUM_REPLICAS = 2, 4, 2


class TimedGroup:
    """A group that notes when its all-reduces start and end, by the number of their elements."""

    def __init__(self, group: Any):
        self._group = group
        self.started: list[tuple[int, float]] = []
        self.ended: list[tuple[int, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def all_reduce(self, tensor: Tensor) -> Any:
        self.started.append((tensor.numel(), time.monotonic_ns() / 1e6))
        work = self._group.all_reduce(tensor)
        running = getattr(work, "_work", None)
        if running is not None:  # small ones go through shared memory
            size = tensor.numel()
            # The callback runs in gloo's thread, when the sum is there.
            running.get_future().add_done_callback(lambda _: self.ended.append((size, time.monotonic_ns() / 1e6)))
        return work


class Step:
    """What one step of all ranks took.

    Attributes:
        timeline: of the first replica's pipeline.
        reductions: by stage, from the start of its first bucket to the end of its last, on that pipeline.
    """

    def __init__(self, rows: list[tuple[list[Span], dict[int, tuple[float, float]]]]):
        ranks = rows[:NUM_POSITIONS]
        self.timeline = Timeline(tuple(Span(*span) for spans, _ in ranks for span in spans))
        self.reductions = {stage: interval for _, found in ranks for stage, interval in found.items()}

    @property
    def makespan_ms(self) -> float:
        """Until the last reduction has ended."""
        ends = [self.timeline.start_ms + self.timeline.makespan_ms, *(end for _, end in self.reductions.values())]
        return max(ends) - self.timeline.start_ms

    def hidden(self, position: int) -> float:
        """The share of the first complete chunk's reduction before the last action of a rank ends."""
        start, end = self.reductions[position + NUM_POSITIONS]
        last_end = max(span.end_ms for span in self.timeline.of_rank(position) if span.computes)
        return max(0.0, min(end, last_end) - start) / (end - start)

    def reduce_ms(self, stage: int) -> float:
        """From the last backward pass of a stage, and the reduction before it, to the end of its reduction."""
        last = max(span.end_ms for span in self.timeline.spans if span.stage == stage and span.computes)
        before = [self.reductions[stage + NUM_POSITIONS][1]] if stage < NUM_POSITIONS else []
        return max(0.0, self.reductions[stage][1] - max(last, *before, 0.0))


def recorded_steps(hidden: int, num_steps: int) -> list[Step]:
    """Steps of training. Collective: all ranks."""
    plugin = HybridParallelPlugin(
        pp_size=NUM_POSITIONS, num_microbatches=NUM_MICROBATCHES, schedule="interleaved", num_model_chunks=2
    )
    timed = TimedGroup(plugin.layout.dp)
    plugin.layout = dataclasses.replace(plugin.layout, dp=timed)
    booster, model = Booster(plugin=plugin), make_vit(hidden)
    whole = make_batch(NUM_REPLICAS * MICROBATCH * NUM_MICROBATCHES)
    batch = {name: tensor.chunk(NUM_REPLICAS)[plugin.layout.here.dp] for name, tensor in whole.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    parts = booster.boost(model, optimizer, lambda outputs, inputs: outputs.loss, sample=batch)
    layout = plugin._engine(parts.model).weights.layout
    assert layout is not None
    stage_of = {bucket.size: bucket.stages[0] for bucket in layout.buckets}
    assert len(stage_of) == len(layout.buckets), "buckets are known by their sizes"
    steps = []
    for _ in range(num_steps + 2):
        dist.barrier()
        timed.started.clear()
        timed.ended.clear()
        with booster.record_timeline(parts.model) as recording:
            booster.execute_pipeline(iter([batch]), parts.model, parts.criterion, parts.optimizer)
            spans = recording.recorder.spans()
        booster_optimizer: Any = parts.optimizer
        booster_optimizer.step()
        found: dict[int, tuple[float, float]] = {}
        for stage in set(stage_of.values()):
            starts = [at for size, at in timed.started if stage_of.get(size) == stage]
            ends = [at for size, at in timed.ended if stage_of.get(size) == stage]
            found[stage] = (min(starts), max(ends))
        rows: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rows, (spans, found))
        steps.append(Step(rows))
    return steps[2:]


def joined(steps: list[Step]) -> Timeline:
    """All spans, one step after the other."""
    return Timeline(tuple(span for step in steps for span in step.timeline.spans))


def compare(steps: list[Step]) -> str:
    """Cells of the table."""
    programs = make_schedule("interleaved", NUM_POSITIONS, NUM_MICROBATCHES)
    rows = []
    for before, step, after in zip(steps[::2], steps[1::2], steps[2::2], strict=False):
        costs = Costs.from_timeline(joined([before, after]), NUM_STAGES)
        reduce_ms = tuple(
            statistics.fmean([before.reduce_ms(stage), after.reduce_ms(stage)]) for stage in range(NUM_STAGES)
        )
        foretold = simulate(programs, dataclasses.replace(costs, reduce_ms=reduce_ms)).timeline.makespan_ms
        without = simulate(programs, costs).timeline.makespan_ms
        off = [100 * (ms / step.makespan_ms - 1) for ms in (foretold, without)]
        spent = [step.reductions[stage][1] - step.reductions[stage][0] for stage in (2, 3)]
        shares = [100 * step.hidden(position) for position in range(NUM_POSITIONS)]
        rows.append((step.makespan_ms, *off, statistics.fmean(spent), *shares))
    ms, off_by, off_without, spent_ms, *hidden = map(statistics.median, zip(*rows, strict=True))
    return f"{ms:.0f} | {off_by:+.1f} % | {off_without:+.1f} % | {spent_ms:.0f} | " + " | ".join(
        f"{share:.0f} %" for share in hidden
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[192, 384])
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    launch_from_torch(seed=0)
    if dist.get_rank() == 0:
        print(
            "| hidden | measured (ms) | foretold, off by | without reduce_ms | reduction (ms) | hidden, 0 | hidden, 1 |"
        )
        print("|--:|--:|--:|--:|--:|--:|--:|", flush=True)
    for hidden in args.hidden:
        steps = recorded_steps(hidden, args.steps)
        if dist.get_rank() == 0:
            print(f"| {hidden} | {compare(steps)} |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
