"""The time to make, check and lower schedules, and to find their completed sends.

python benchmarks/check_schedule.py [--ranks 8] [--microbatches 64]
"""

import argparse
import time
from collections.abc import Callable
from typing import TypeVar

from hybridpp.schedule import SCHEDULES, check_program, completed_sends, lower, make_schedule

Result = TypeVar("Result")


def timed(call: Callable[[], Result], repeats: int = 5) -> tuple[float, Result]:
    """The shortest of a few runs, in milliseconds, and what the last one gave."""
    times_ms = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = call()
        times_ms.append(1000 * (time.perf_counter() - start))
    return min(times_ms), result


def main() -> None:
    """One line per schedule."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=64)
    options = parser.parse_args()
    print(f"{options.ranks} ranks, {options.microbatches} micro-batches; milliseconds")
    print(f"{'schedule':<15} {'actions':>8} {'make':>8} {'check':>8} {'lower':>8} {'sends':>8}")
    for name in SCHEDULES:
        make_ms, programs = timed(lambda name=name: make_schedule(name, options.ranks, options.microbatches))
        check_ms, _ = timed(lambda programs=programs: check_program(programs))
        lower_ms, lowered = timed(lambda programs=programs: lower(programs))
        sends_ms, _ = timed(lambda lowered=lowered: completed_sends(lowered))
        num_actions = sum(map(len, programs))
        print(f"{name:<15} {num_actions:>8} {make_ms:>8.1f} {check_ms:>8.1f} {lower_ms:>8.1f} {sends_ms:>8.1f}")


if __name__ == "__main__":
    main()
