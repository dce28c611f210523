"""What a step costs a rank, and where it waits: 1F1B of this library, of torch, and a bare loop, on two ranks.

    OMP_NUM_THREADS=1 PYTHONPATH=.:plugins torchrun --standalone --nproc-per-node 2 benchmarks/rank_cost.py

The pipelines of ``schedules.py``, which take turns in one process per rank. On a host that does other work as well,
processor time, page faults and waits say more than wall time. Medians over the rounds, in ms; "faults" are minor page
faults. "late" is the time between the end of what an action needs (this rank's action before it, the peer's message)
and its start, of all actions together: transport, wake-up, and all that an implementation does between two actions.
"""

import argparse
import random
import resource
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from baselines import StepFunction, bare_loop, hybridpp, torch_pipelining
from vit import HandCut, make_batch

from hybridpp import launch_from_torch
from hybridpp.partition import StagedModel

MICROBATCH, NUM_MICROBATCHES = 4, 8
FORWARD, BACKWARD = "F", "B"
OURS, TORCHS, BARE = "hybridpp 1f1b", "torch 1F1B", "a bare 1F1B loop"
Key = tuple[str, int]


class Span(NamedTuple):
    """An action: its kind, start and end in seconds on the clock of the host, and processor time in seconds."""

    kind: str
    start: float
    end: float
    cpu: float


class Cost(NamedTuple):
    """What one step took of one rank, in ms, and its page faults."""

    wall: float
    user: float
    system: float
    faults: float
    forward: float
    backward: float
    late: float


def recorded(function: Callable[..., Any], kind: str, spans: list[Span]) -> Callable[..., Any]:
    """``function``, each call of which adds a span."""

    def call(*args: Any, **kwargs: Any) -> Any:
        start, cpu = time.perf_counter(), time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            spans.append(Span(kind, start, time.perf_counter(), time.thread_time() - cpu))

    return call


def order_of(rank: int) -> list[Key]:
    """The actions of a rank of two under 1F1B: kind and micro-batch."""
    ahead = 1 - rank
    actions: list[Key] = [(FORWARD, number) for number in range(ahead)]
    for number in range(NUM_MICROBATCHES):
        if number + ahead < NUM_MICROBATCHES:
            actions.append((FORWARD, number + ahead))
        actions.append((BACKWARD, number))
    return actions


def lateness(rank: int, start: float, spans: list[list[Span]]) -> float:
    """Seconds between what the actions of a rank waited for and their starts."""
    known = [dict(zip(order_of(one), spans[one], strict=True)) for one in range(2)]
    needs_peer = FORWARD if rank else BACKWARD
    late, before = 0.0, start
    for key, span in known[rank].items():
        arrived = known[1 - rank][key].end if key[0] == needs_peer else start
        late += span.start - max(before, arrived)
        before = span.end
    return late


def run(step: StepFunction, spans: list[Span]) -> list[Cost]:
    """One step; the costs of both ranks. Collective: both."""
    spans.clear()
    dist.barrier()
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    step()
    after = resource.getrusage(resource.RUSAGE_SELF)
    dist.barrier()
    wall = time.perf_counter() - start
    mine = (
        wall * 1e3,
        (after.ru_utime - before.ru_utime) * 1e3,
        (after.ru_stime - before.ru_stime) * 1e3,
        float(after.ru_minflt - before.ru_minflt),
        *(sum(span.cpu for span in spans if span.kind == kind) * 1e3 for kind in (FORWARD, BACKWARD)),
    )
    found: list[Any] = [None, None]
    dist.all_gather_object(found, (mine, start, list(spans)))
    both = [spans_of for _, _, spans_of in found]
    return [Cost(*costs, lateness(rank, begun, both) * 1e3) for rank, (costs, begun, _) in enumerate(found)]


def measure(hidden: int, rounds: int) -> dict[str, list[list[Cost]]]:
    """The costs of every step, by variant, round and rank."""
    batch = make_batch(MICROBATCH * NUM_MICROBATCHES)
    steps = {
        OURS: hybridpp(hidden, batch, NUM_MICROBATCHES, "1f1b"),
        TORCHS: torch_pipelining(hidden, batch, NUM_MICROBATCHES, "1F1B"),
        BARE: bare_loop(hidden, batch, NUM_MICROBATCHES),
    }
    for step in steps.values():
        # Torch runs its first forward twice, once for the shapes.
        step()
        step()
    spans: list[Span] = []
    places = ((HandCut, "forward", FORWARD), (StagedModel, "forward", FORWARD), (torch.autograd, "backward", BACKWARD))
    originals = [getattr(owner, name) for owner, name, _ in places]
    order = random.Random(hidden)
    costs: dict[str, list[list[Cost]]] = {name: [] for name in steps}
    try:
        for (owner, name, kind), original in zip(places, originals, strict=True):
            setattr(owner, name, recorded(original, kind, spans))
        for _ in range(rounds):
            for name in order.sample(list(steps), len(steps)):
                costs[name].append(run(steps[name], spans))
    finally:
        for (owner, name, _), original in zip(places, originals, strict=True):
            setattr(owner, name, original)
    return costs


def processor_time(costs: list[Cost]) -> float:
    """Of all ranks, in ms."""
    return sum(cost.user + cost.system for cost in costs)


def report(hidden: int, costs: dict[str, list[list[Cost]]]) -> None:
    """Print a table of medians, and the ratios of processor time round by round."""
    print(f"\n| hidden {hidden} | rank | wall | user | system | faults | F | B | late |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for name, rounds in costs.items():
        for rank in range(2):
            medians = [statistics.median(column) for column in zip(*(one[rank] for one in rounds), strict=True)]
            print(f"| {name} | {rank} | {' | '.join(f'{value:.0f}' for value in medians)} |", flush=True)
    print("\n| processor time of both ranks, over this library's | median | quartiles |\n|---|--:|--:|")
    for name in (TORCHS, BARE):
        pairs = zip(costs[name], costs[OURS], strict=True)
        ratios = [processor_time(theirs) / processor_time(ours) for theirs, ours in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"| {name} | {middle:.3f} | {low:.3f} to {high:.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[192, 384])
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    launch_from_torch(seed=0)
    for hidden in args.hidden:
        costs = measure(hidden, args.rounds)
        if dist.get_rank() == 0:
            report(hidden, costs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
