"""The overhead of an action, without computation and communication.

    OMP_NUM_THREADS=1 PYTHONPATH=.:plugins python benchmarks/executor_cost.py

One rank of a pipeline of two runs a schedule on a stage that returns its input, over a transport that sends nothing.
Autograd's own time for that stage, called without an executor, is measured in the same rounds and subtracted.
"""

import argparse
import statistics
import time
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from hybridpp.pipeline import Executor, Microbatch, PipelineStep, RankProgram, Transport, rank_programs
from hybridpp.schedule import make_schedule

CPU = torch.device("cpu")


class Nowhere:
    """A group of two that sends into the void and receives from it."""

    def __init__(self, rank: int):
        self.rank, self.size = rank, 2

    def send(self, tensor: Tensor, peer: int) -> "Nowhere":
        return self

    receive = send

    def wait(self) -> None:
        return


class Spec:
    """One number that wants a gradient."""

    shape, dtype, requires_grad = (1,), torch.float32, True


class Plan:
    """What crosses the borders of a stage."""

    def __init__(self, stage: int, last: int):
        self.incoming_specs = [Spec] if stage else []
        self.outgoing_specs = [] if stage == last else [Spec]
        self.is_last = stage == last


class HandsOn:
    """Stages whose output is their input."""

    def __init__(self, num_stages: int):
        self._plans = {stage: Plan(stage, num_stages - 1) for stage in range(num_stages)}

    def plans(self, args: Any, kwargs: Any) -> dict[int, Plan]:
        return self._plans

    def forward(
        self, plan: Plan, args: Any, kwargs: Any, received: Any, key: int, recompute: bool
    ) -> tuple[list[Tensor], Any, Any]:
        x = received[0] if received else args[0]
        return ([], x, None) if plan.is_last else ([x], None, None)

    def recomputing(self, context: Any) -> Any:
        return nullcontext()


def run(executor: Executor, program: RankProgram, step: PipelineStep) -> float:
    """Microseconds per action."""
    start = time.perf_counter()
    executor.run(program, step)
    return (time.perf_counter() - start) / len(program.actions) * 1e6


def autograd_alone(num_microbatches: int, is_last: bool, num_actions: int) -> float:
    """Microseconds per action that the engine takes to go back through such a stage."""
    x = torch.zeros(1, requires_grad=True)
    gradient = torch.zeros(1)
    start = time.perf_counter()
    for _ in range(num_microbatches):
        if is_last:
            torch.autograd.backward(x.sum() * 1.0)
        else:
            torch.autograd.backward(x, gradient)
    return (time.perf_counter() - start) / num_actions * 1e6


def make_step(num_microbatches: int) -> PipelineStep:
    x = torch.zeros(1, requires_grad=True)
    return PipelineStep(
        microbatches=[Microbatch(x, 1, 1.0) for _ in range(num_microbatches)],
        loss_weights=[1.0] * num_microbatches,
        keys=list(range(num_microbatches)),
        criterion=lambda outputs, inputs: outputs.sum(),
        training=True,
        keep_outputs=False,
        begin_last_backward=lambda stage, pending: False,
        end_backward=lambda: None,
        reduce_gradients=lambda stage: None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=50)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| schedule, rank | actions | µs per action | of these autograd's | the executor's |")
    print("|---|--:|--:|--:|--:|")
    for name in ("1f1b", "interleaved", "zb-h1", "zb-v"):
        programs = rank_programs(make_schedule(name, 2, args.microbatches))
        for rank, program in enumerate(programs):
            lane = Nowhere(rank)
            transport = Transport(lane, CPU)
            executor = Executor(HandsOn(len(program.placement)), transport, CPU)
            step = make_step(args.microbatches)
            size = len(program.actions)
            stages = [stage for stage, place in enumerate(program.placement) if place == rank]
            whole, alone = [], []
            for _ in range(args.rounds):
                whole.append(run(executor, program, step))
                last = len(program.placement) - 1
                alone.append(sum(autograd_alone(args.microbatches, stage == last, size) for stage in stages))
            median, engine = statistics.median(whole), statistics.median(alone)
            print(f"| {name}, {rank} | {size} | {median:.1f} | {engine:.1f} | {median - engine:.1f} |", flush=True)


if __name__ == "__main__":
    main()
