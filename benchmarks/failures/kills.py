"""How soon a job ends of which one rank was killed: each rank, at each of 15 places, in 6 layouts.

    PYTHONPATH=.:plugins:tests python benchmarks/failures/kills.py hand      # nobody looks after the ranks
    PYTHONPATH=.:plugins:tests python benchmarks/failures/kills.py gloo      # so, without shared memory
    PYTHONPATH=.:plugins:tests python benchmarks/failures/kills.py launcher  # hybridpp run

Each job is ``tests/scripts/dying.py``, in forks, with ``timeout_s=600``. Printed is the time from SIGKILL to the end of
the last survivor (with ``launcher``: of the launcher, too). Where it is more than 10 s, the exit code says so.
"""

import argparse
import statistics
import sys
from collections import defaultdict

import hybridpp_plugins.engine  # noqa: F401  # for the forks
from killed_jobs import by_hand, dying, launched

BOUND_S = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("hand", "gloo", "launcher"))
    parser.add_argument("--layouts", nargs="+", choices=dying.LAYOUTS, default=list(dying.LAYOUTS))
    parser.add_argument("--places", nargs="+", choices=dying.PLACES, default=list(dying.PLACES))
    parser.add_argument("--ranks", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--verbose", action="store_true", help="print what the jobs print")
    options = parser.parse_args()
    environment = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    if options.what == "gloo":
        environment["HYBRIDPP_SHARED_MEMORY"] = "0"
    run = launched if options.what == "launcher" else by_hand
    times: dict[str, list[float]] = defaultdict(list)
    for place in options.places:
        for layout in options.layouts:
            for victim in options.ranks:
                if victim >= dying.LAYOUTS[layout]["ranks"]:
                    continue
                ended = run(layout, place, victim, environment)
                times[place].append(ended.seconds)
                if options.verbose or ended.seconds > BOUND_S:
                    told = f"{place}, {layout}, rank {victim}: {ended.seconds:.1f} s, exit {ended.codes}"
                    print(f"{told}\n{ended.printed}", flush=True)
        if row := times[place]:
            print(
                f"{place:15} {len(row):3} kills: {statistics.median(row):5.1f} s, at most {max(row):5.1f} s", flush=True
            )
    found = [one for row in times.values() for one in row]
    late = sum(one > BOUND_S for one in found)
    print(
        f"{len(found)} kills: {statistics.median(found):.1f} s (median), at most {max(found):.1f} s; {late} above "
        f"{BOUND_S:g} s"
    )
    return late > 0


if __name__ == "__main__":
    sys.exit(main())
