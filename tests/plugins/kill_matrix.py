"""SIGKILL of each rank of a job at points all over a save: what is found afterwards is always one whole checkpoint.

PYTHONPATH=.:plugins:tests python tests/plugins/kill_matrix.py [--points 10] [--only "rank 1 .* asynchronous"]

Ranks are gloo processes. A rank kills itself at a call that changes a file or takes a tensor to be written; the other
one goes on as long as it can, as where a launcher is slow. The folder held step 1. Afterwards, the newest checkpoint
must have all tensors of the old one, or all of the new one, and a new job resumes from it, and saves.
"""

import argparse
import functools
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from hybridpp_plugins.folder_save import FolderSave
from processes import free_port, run_ranks
from run_checkpoints import Run, on_layout, tensors_in

from hybridpp import launch
from hybridpp.checkpoint import writer
from hybridpp.checkpoint.commit import committed_steps, open_step, step_folder
from hybridpp.checkpoint.reader import verify_file
from hybridpp.errors import CheckpointError

LAYOUTS = {"pp2": {"pp_size": 2}, "dp2 zero 1": {"zero_stage": 1}}
# How long a rank may go on after its peer is gone.
PATIENCE_S = 20.0
# So that each rank writes several files.
FILE_BYTES = 20_000


class Case(NamedTuple):
    """Which rank is killed, in which save."""

    layout: str
    rank: int
    step: int
    asynchronous: bool

    def __str__(self):
        what = "the same step again" if self.step == 1 else "the next step"
        return f"{self.layout}, rank {self.rank}, {what}, {'asynchronous' if self.asynchronous else 'synchronous'}"


class Counted:
    """Counts calls; the process is killed at one of them.

    Args:
        fatal: number of that call; 0: none.
    """

    def __init__(self, fatal):
        self.fatal, self.count, self.lock = fatal, 0, threading.Lock()

    def watched(self, call):
        @functools.wraps(call)
        def run(*args, **kwargs):
            with self.lock:
                self.count += 1
                if self.count == self.fatal:
                    os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return run

    def install(self):
        files = ("open", "mkdir", "touch", "unlink", "rmdir", "write_text")
        calls = {os: ("fsync", "replace", "pwrite", "ftruncate"), Path: files, writer: ("values",)}
        for owner, names in calls.items():
            for name in names:
                setattr(owner, name, self.watched(getattr(owner, name)))


def job(case, path, fatal=0):
    """Resume, train and save on this rank; returns the number of calls of the rank that may be killed."""
    FolderSave.__init__.__defaults__ = (FILE_BYTES,)
    counted = Counted(fatal)
    run = Run(**LAYOUTS[case.layout])
    run.booster.resume(path, missing="fresh")
    run.steps([1])
    if torch.distributed.get_rank() == case.rank:
        counted.install()
    run.booster.save(path, step=case.step, keep_last=1, asynchronous=case.asynchronous)
    run.booster.wait_for_save()
    return counted.count


def rank_of(case, path, fatal, rank, port):
    """A process of the job that is killed."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):  # what the other rank says of its peer
        os.dup2(nothing, descriptor)
    torch.set_num_threads(1)
    launch(rank, 2, "127.0.0.1", port, backend="gloo", timeout_s=PATIENCE_S)
    job(case, path, fatal)


def killed(case, path, fatal):
    """Whether the rank was killed; the other one ends by itself, or is ended later."""
    context, port = multiprocessing.get_context("fork"), free_port()
    ranks = [context.Process(target=rank_of, args=(case, path, fatal, rank, port)) for rank in range(2)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + 3 * PATIENCE_S
    for process in (ranks[case.rank], ranks[1 - case.rank]):
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()
    return ranks[case.rank].exitcode == -signal.SIGKILL


def found(path):
    """The newest checkpoint: its step and its tensors. It must be intact."""
    (step, *_) = committed_steps(path)
    manifest = open_step(path, step)
    for name in manifest.files:
        verify_file(step_folder(path, step), manifest, name)
    return step, tensors_in(path, step)


def same(some, others):
    """Whether tensors are equal, bit for bit."""
    return some.keys() == others.keys() and all(torch.equal(tensor, others[key]) for key, tensor in some.items())


def resumed(path, case):
    """The step from which a new job goes on, in one process; it saves, which removes what was left."""

    def rank(make):
        run = make()
        step = run.booster.resume(path).step
        run.booster.save(path, step=9, keep_last=1)
        return step

    (step,) = on_layout(rank)
    left = [entry.name for entry in path.iterdir()]
    assert left == [step_folder(path, 9).name], f"{left} are left"
    return step


def outcomes(case, old, num_points, folder):
    """What a killed save left, at so many points: "the old one" or "the new one"; else what is wrong."""
    shutil.copytree(old, folder / "whole")
    calls = run_ranks(functools.partial(job, case, folder / "whole"), 2)[case.rank]
    before, after = found(old), found(folder / "whole")
    points = sorted({round(1 + point * (calls - 1) / (num_points - 1)) for point in range(num_points)})
    for point in points:
        path = folder / f"at {point}"
        shutil.copytree(old, path)
        try:
            if not killed(case, path, point):
                yield point, calls, "WRONG: the rank was not killed"
                continue
            now = found(path)
            kinds = [name for name, there in (("old", before), ("new", after)) if same(now[1], there[1])]
            step = resumed(path, case)
            is_right = kinds and step == now[0] == (case.step if kinds == ["new"] else 1)
            yield point, calls, f"the {kinds[0]} one" if is_right else f"WRONG: {kinds} {now[0]} {step}"
        except (CheckpointError, AssertionError, ValueError) as error:
            yield point, calls, f"WRONG: {error}"
        shutil.rmtree(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=10, help="of each save")
    parser.add_argument("--only", default="", help="a regular expression for names of cases")
    options = parser.parse_args()
    total, start = Counter(), time.monotonic()
    for layout in LAYOUTS:
        cases = [Case(layout, *more) for more in product((0, 1), (1, 2), (False, True))]
        cases = [case for case in cases if re.search(options.only, str(case))]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if cases:
                run_ranks(functools.partial(job, cases[0]._replace(step=1, asynchronous=False), folder / "old"), 2)
            for number, case in enumerate(cases):
                (folder / str(number)).mkdir()
                results = list(outcomes(case, folder / "old", options.points, folder / str(number)))
                kinds = Counter(kind.partition(":")[0] for _, _, kind in results)
                total += kinds
                print(f"{case}: {results[0][1]} calls, killed at {len(results)}: {dict(kinds)}", flush=True)
                for point, _, kind in results:
                    if kind.startswith("WRONG"):
                        print(f"  at call {point}: {kind}", flush=True)
    print(f"{sum(total.values())} kills: {dict(total)}, {time.monotonic() - start:.0f} s")
    return 1 if total["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())
