"""Jobs of four ranks that hang at a given rank and place: whether the report names it, and when.

    PYTHONPATH=.:plugins:tests python benchmarks/failures/hangs.py [--only stop]

Each job is four forked processes over gloo (two stages of two replicas, or of two tensor-parallel ranks), whose third
step hangs: the process sleeps, is stopped (SIGSTOP), holds Python's lock in C code, or is killed; so do workers of its
dataloader, saves, a resume and the model's constructor (see the script). The time is that from
the hang to the end of the last rank that can end, so it includes the report. ``--pause 120`` runs the jobs that must
not be reported instead: a trace of so many seconds, and a pause of all ranks between two steps.
"""

import argparse
import os
import re
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from processes import RankFailed, run_script
from torch.distributed import TCPStore

SCRIPT = Path(__file__).parents[2] / "tests/scripts/hanging.py"
# The job ends as well in the time after the limit.
LIMIT_S, GRACE_S = 5.0, 7.0
ACTIONS = {  # by action, its rank at two stages of two replicas
    "0F0": 0,
    "0F3": 2,
    "1F1": 1,
    "1F2": 3,
    "0B0": 0,
    "0B3": 2,
    "1B0": 3,
    "1B3": 1,
    "0SEND_F1": 0,
    "1RECV_F2": 1,
}


class Case(NamedTuple):
    """A job.

    Attributes:
        what: happens to the rank.
        rank: which one.
        where: in the job.
        expected: what the report says of it.
        more: settings of the script.
    """

    what: str
    rank: int
    where: str
    expected: str
    more: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """In words."""
        words = "".join(f" ({one})" for one in self.more if one in ("tp=2", "pp=1", "own=1", "wait=0"))
        return f"{self.what} at {self.where} on rank {self.rank}{words}"


STOPPED, IN_KERNEL = "is stopped (SIGSTOP", "is in a wait of the kernel"
# In torch's code, which does not tell who has not come: no rank is named.
CONNECTION = "or one of them that stands still in torch"
ONE_STAGE = ("pp=1",)


def worker_cases() -> list[Case]:
    """Workers of dataloaders: of two replicas of two stages and of four replicas, of the plugin and of torch."""
    found = []
    for layout, rank in (((), 1), (ONE_STAGE, 2)):
        for loader in ((), ("own=1",)):
            more = (*layout, *loader)
            found += [
                Case("kill", rank, "worker", "has ended: killed by signal: Killed", more),
                Case("stop", rank, "worker", "Processes that it started are stopped: ", more),
                Case("lock", rank, "worker", "which loads data for it, innermost call last", more),
            ]
    return [*found, Case("disk", 0, "worker", "Processes that it started wait in the kernel")]


def call_cases() -> list[Case]:
    """Saves, a resume and a boost."""
    save, setup, script = ("save=6",), ("setup=6",), ("script=6",)
    at_end = ("save=6", "wait=0", "steps=3")
    return [
        *(Case(what, rank, "save", text, save) for rank in (0, 3) for what, text in _KINDS.items()),
        Case("sleep", 1, "state_dict", "it is in booster.save", save),
        Case("lock", 0, "remote", "it is in booster.save", save),
        Case("lock", 2, "background", "it is in booster.wait_for_save", save),
        Case("lock", 1, "background", "waits for the part of a save of rank 1", at_end),
        Case("stop", 3, "background", STOPPED, save),
        *(Case(what, 2, "resume", text.replace("save", "resume"), save) for what, text in _KINDS.items()),
        *(Case(what, 1, "trace", text.replace("save", "boost"), setup) for what, text in _KINDS.items()),
        Case("sleep", 3, "constructor", "Rank 3 has not come to", script),
        Case("stop", 0, "constructor", STOPPED, script),
        Case("stop", 2, "group", STOPPED, setup),
        *(Case("sleep", rank, "group", CONNECTION, setup) for rank in (0, 3)),
    ]


_KINDS = {"sleep": "it is in booster.save", "stop": STOPPED, "disk": IN_KERNEL}


def cases() -> list[Case]:
    """All jobs that must be reported."""
    found = [Case("sleep", rank, action, f"({action})") for action, rank in ACTIONS.items()]
    found += [Case("stop", rank, action, "is stopped (SIGSTOP") for action, rank in ACTIONS.items()]
    tensor_parallel = ("tp=2",)
    return [
        *found,
        Case("sleep", 3, "1B2", "(1B2)", tensor_parallel),
        Case("stop", 1, "0F2", "is stopped (SIGSTOP", tensor_parallel),
        Case("sleep", 0, "loader", "reading a batch from a DataLoader of"),
        Case("sleep", 3, "loader", "reading a batch from a DataLoader of"),
        Case("stop", 1, "loader", "is stopped (SIGSTOP"),
        Case("sleep", 2, "script", "has not come to training step 4 of Model", ("script=5",)),
        Case("stop", 0, "script", "is stopped (SIGSTOP", ("script=5",)),
        Case("hold", 1, "1F1", "code in C holds its interpreter"),
        Case("hold", 2, "loader", "code in C holds its interpreter"),
        *worker_cases(),
        *call_cases(),
    ]


def run(case: Case) -> tuple[bool, float, str]:
    """Whether the report is right, the seconds to it, and all output."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "AGENT_PORT": str(store.port)}
    os.environ["FOLDER"] = tempfile.mkdtemp(prefix="hangs-")
    arguments = (case.what, str(case.rank), case.where, f"limit={LIMIT_S}", *case.more)
    try:
        job = run_script(4, SCRIPT, *arguments, timeout_s=LIMIT_S + 60, until_all_end=True)
    except RankFailed as error:
        return False, float("inf"), str(error)
    seconds = time.time() - float(re.findall(r"HANGS ([\d.]+)", job.stdout)[0])
    is_error = case.what == "kill"
    suspects = re.findall(rf"{'hybridpp:' if is_error else 'first suspect is'} rank (\d+)", job.stderr)
    codes = (1,) if is_error else (9, 75)
    named = [] if case.expected == CONNECTION else [str(case.rank)]
    is_right = suspects == named and case.expected in job.stderr and job.returncode in codes
    return is_right, seconds, job.stderr


def patient(pause_s: float) -> bool:
    """Run jobs that must end without a report."""
    ends = True
    for where, rank in (("trace", 1), ("script", -1)):
        pause = (f"limit={LIMIT_S}", f"pause={pause_s}")
        job = run_script(4, SCRIPT, "sleep", str(rank), where, *pause, timeout_s=2 * pause_s + 60)
        is_right = job.returncode == 0 and "this job hangs" not in job.stderr and job.stdout.count("DONE") == 4
        print(
            f"{where} of {pause_s:.0f} s, watchdog_s={LIMIT_S:g}: {'no alarm' if is_right else job.stderr}", flush=True
        )
        ends &= is_right
    return ends


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression: cases whose names match")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds; run what must not be reported")
    parser.add_argument("--verbose", action="store_true", help="print every report")
    arguments = parser.parse_args()
    if arguments.pause:
        return not patient(arguments.pause)
    times, num_right, num_run = [], 0, 0
    for case in cases():
        if not re.search(arguments.only, case.name):
            continue
        is_right, seconds, output = run(case)
        is_right &= seconds <= LIMIT_S + GRACE_S
        num_run, num_right = num_run + 1, num_right + is_right
        times.append(seconds)
        print(f"{case.name:45} {'named' if is_right else 'WRONG'} after {seconds:.1f} s", flush=True)
        if arguments.verbose or not is_right:
            print(output, flush=True)
    print(f"{num_right} of {num_run} named; limit {LIMIT_S:g} s")
    print(f"after {statistics.median(times):.1f} s (median), at most {max(times):.1f} s")
    return num_right < num_run


if __name__ == "__main__":
    sys.exit(main())
