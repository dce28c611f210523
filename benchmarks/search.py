"""Searched schedules against the best named one and against a lower bound, on random costs; and the search's time.

    PYTHONPATH=.:plugins python benchmarks/search.py

Each profile has 2 to 8 ranks, 1 or 2 stages per rank and 4 to 32 micro-batches. Stages and kinds of actions take times
that differ by up to a factor of 3, messages up to half as long. Every third profile has a cap on the bytes of each
rank, between those of the leanest and of the fastest named schedule; every sixth may recompute, too.
"""

import argparse
import random
import statistics
import time
from dataclasses import dataclass, replace

from hybridpp.schedule import SCHEDULES, Programs, check_program, placement
from hybridpp.simulate import Costs, FoundSchedule, search_schedule, simulate


@dataclass(frozen=True)
class Profile:
    costs: Costs
    num_ranks: int
    num_microbatches: int
    memory_bytes: float | None = None


def random_profile(seed: int) -> Profile:
    generator = random.Random(seed)
    num_ranks, chunks = generator.randint(2, 8), generator.choice((1, 2))
    num_stages, num_microbatches = num_ranks * chunks, generator.randint(4, 32)

    def numbers(low: float, high: float, count: int = num_stages) -> tuple[float, ...]:
        return tuple(generator.uniform(low, high) for _ in range(count))

    costs = Costs(
        num_stages=num_stages,
        forward_ms=numbers(0.5, 1.5),
        input_gradient_ms=numbers(0.5, 1.5),
        weight_gradient_ms=numbers(0.5, 1.5),
        send_ms=numbers(0.0, 0.5, num_stages - 1),
        post_ms=generator.uniform(0.0, 0.05),
        activation_bytes=numbers(50, 150),
        weight_gradient_bytes=numbers(10, 50),
    )
    if generator.random() < 0.5:  # an unsplit backward pass is often the cheaper one
        both = zip(costs.input_gradient_ms, costs.weight_gradient_ms, strict=True)  # type: ignore[arg-type]
        costs = replace(costs, backward_ms=tuple(generator.uniform(0.85, 1.0) * sum(pair) for pair in both))
    profile = Profile(costs, num_ranks, num_microbatches)
    if seed % 3:
        return profile
    peaks = sorted((result.step_ms, result.peak) for result in named(profile))
    leanest = min(peak for _, peak in peaks)
    cap = generator.uniform(leanest, max(peaks[0][1], leanest))
    if seed % 6 == 0:
        costs = replace(costs, recompute_ms=numbers(0.3, 1.0), recomputed_bytes=10.0)
    return replace(profile, costs=costs, memory_bytes=cap)


@dataclass(frozen=True)
class Named:
    name: str
    step_ms: float
    peak: float


def named(profile: Profile) -> list[Named]:
    """Every named schedule of the profile's sizes that fits without recomputation."""
    chunks, found = profile.costs.num_stages // profile.num_ranks, []
    for entry in SCHEDULES.values():
        if chunks == entry.num_chunks or entry.takes_chunks:
            programs = entry.make(profile.num_ranks, profile.num_microbatches, chunks)
            simulation = simulate(programs, profile.costs)
            one = Named(entry.name, simulation.timeline.makespan_ms, max(simulation.peak_bytes))
            if profile.memory_bytes is None or one.peak <= profile.memory_bytes:
                found.append(one)
    return found


def check(profile: Profile, found: FoundSchedule) -> None:
    """Fail if the result is not a schedule, does not fit, or takes another time than the search says."""
    programs: Programs = found.programs
    check_program(programs, profile.costs.num_stages, profile.num_microbatches)
    assert len(programs) == profile.num_ranks
    assert len(placement(programs)) == profile.costs.num_stages
    simulation = simulate(programs, profile.costs.with_recomputation(found.recomputed_stages))
    assert simulation.timeline.makespan_ms == found.step_ms >= found.lower_bound_ms * (1 - 1e-9)
    for peak, simulated in zip(found.peak_bytes, simulation.peak_bytes, strict=True):
        assert simulated <= peak <= (profile.memory_bytes or float("inf")) * (1 + 1e-9)


def show(title: str, values: list[float]) -> None:
    tenth = statistics.quantiles(values, n=10)
    print(f"{title}: median {100 * statistics.median(values):.2f} %, 9 of 10 at most {100 * tenth[-1]:.2f} %, ", end="")
    print(f"largest {100 * max(values):.2f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profiles", type=int, default=100)
    arguments = parser.parse_args()
    gaps: dict[str, list[float]] = {"no cap": [], "cap": [], "cap, may recompute": []}
    named_gaps: dict[str, list[float]] = {kind: [] for kind in gaps}
    worse, recomputing, names = 0, 0, []
    for seed in range(arguments.profiles):
        profile = random_profile(seed)
        kind = "no cap" if seed % 3 else "cap" if seed % 6 else "cap, may recompute"
        found = search_schedule(
            profile.costs, profile.num_ranks, profile.num_microbatches, memory_bytes=profile.memory_bytes
        )
        check(profile, found)
        best = min(one.step_ms for one in named(profile))
        worse += found.step_ms > best
        recomputing += bool(found.recomputed_stages)
        names.append(found.name)
        gaps[kind].append(found.gap)
        named_gaps[kind].append(best / found.lower_bound_ms - 1)
    print(f"{arguments.profiles} profiles, {worse} worse than the best named, {recomputing} recompute")
    print(f"found by the greedy scheduler: {names.count('greedy')}")
    for kind in gaps:
        show(f"{kind} ({len(gaps[kind])}), above the bound, found", gaps[kind])
        show(f"{kind} ({len(gaps[kind])}), above the bound, best named", named_gaps[kind])
    for chunks in (1, 2):
        costs = Costs(num_stages=8 * chunks, send_ms=0.1, post_ms=0.02, activation_bytes=1.0 / chunks)
        for cap, recompute in ((None, None), (8.0, None), (5.0, 0.1)):
            costs = replace(costs, recomputed_bytes=recompute, recompute_ms=0.8)
            begin = time.process_time()
            found = search_schedule(costs, 8, 64, memory_bytes=cap)
            taken = time.process_time() - begin
            print(
                f"p=8, m=64, {chunks} per rank, cap {cap}, recompute {recompute}: {taken:.1f} s of processor time, "
                f"{found.name}, gap {100 * found.gap:.2f} %, recomputed {found.recomputed_stages}"
            )


if __name__ == "__main__":
    main()
