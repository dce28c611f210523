"""How soon a job ends of which one rank was killed: each rank, at each of 15 places, in 6 layouts.

    PYTHONPATH=.:plugins:tests python benchmarks/failures/kills.py hand      # nobody looks after the ranks
    PYTHONPATH=.:plugins:tests python benchmarks/failures/kills.py gloo      # so, without shared memory
    PYTHONPATH=.:plugins:tests python benchmarks/failures/kills.py launcher  # hybridpp run
    PYTHONPATH=.:plugins:tests python benchmarks/failures/kills.py torchrun

Each job is ``tests/scripts/dying.py``, in forks, with ``timeout_s=600``. Printed is the time from SIGKILL to the end of
the last survivor (with ``launcher`` and ``torchrun``: of the launcher, too). Where it is more than 10 s, the exit code
says so. ``--log FILE`` keeps each kill; those that the file has from an earlier call are not repeated.
"""

import argparse
import functools
import json
import statistics
import sys
from pathlib import Path

import hybridpp_plugins.engine  # noqa: F401  # for the forks
from killed_jobs import by_hand, dying, launched

BOUND_S = 10.0
WAYS = {
    "hand": by_hand,
    "gloo": by_hand,
    "launcher": launched,
    "torchrun": functools.partial(launched, by_torchrun=True),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=WAYS)
    parser.add_argument("--layouts", nargs="+", choices=dying.LAYOUTS, default=list(dying.LAYOUTS))
    parser.add_argument("--places", nargs="+", choices=dying.PLACES, default=list(dying.PLACES))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 0, 3, 2], help="one after another, at all places")
    parser.add_argument("--log", type=Path, help="a file of lines of JSON")
    parser.add_argument("--verbose", action="store_true", help="print what the jobs print")
    options = parser.parse_args()
    environment = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    if options.what == "gloo":
        environment["HYBRIDPP_SHARED_MEMORY"] = "0"
    seconds: dict[tuple[str, str, int], float] = {}
    if options.log is not None and options.log.exists():
        for line in map(json.loads, options.log.read_text().splitlines()):
            if line["what"] == options.what:
                seconds[line["place"], line["layout"], line["rank"]] = line["seconds"]
    for victim in options.ranks:
        for place in options.places:
            for layout in options.layouts:
                if victim >= dying.LAYOUTS[layout]["ranks"] or (place, layout, victim) in seconds:
                    continue
                ended = WAYS[options.what](layout, place, victim, environment)
                seconds[place, layout, victim] = ended.seconds
                if options.log is not None:
                    line = {"what": options.what, "place": place, "layout": layout, "rank": victim}
                    with options.log.open("a") as file:
                        file.write(json.dumps({**line, "seconds": ended.seconds}) + "\n")
                if options.verbose or ended.seconds > BOUND_S:
                    told = f"{place}, {layout}, rank {victim}: {ended.seconds:.1f} s, exit {ended.codes}"
                    print(f"{told}\n{ended.printed}", flush=True)
    for place in options.places:
        if row := [one for (where, *_), one in seconds.items() if where == place]:
            print(f"{place:15} {len(row):3} kills: {statistics.median(row):5.1f} s, at most {max(row):5.1f} s")
    found = list(seconds.values())
    late = sum(one > BOUND_S for one in found)
    print(
        f"{len(found)} kills: {statistics.median(found):.1f} s (median), at most {max(found):.1f} s; {late} above "
        f"{BOUND_S:g} s"
    )
    return late > 0


if __name__ == "__main__":
    sys.exit(main())
