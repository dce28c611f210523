"""One rank is killed in a save: resume finds one whole step, and the other ranks end with an error."""

import contextlib
import functools
import multiprocessing
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from hybridpp_plugins import background_save
from hybridpp_plugins.background_save import BackgroundSave
from processes import after_fork, free_port
from run_checkpoints import Run, on_layout, resumed, tensors_in

from hybridpp import launch
from hybridpp.checkpoint.commit import committed_steps
from hybridpp.cluster import current_world
from hybridpp.errors import PeerError

LAYOUT = {"pp_size": 2}
NUM_POINTS = 7
WATCHED = (
    (os, ("fsync", "replace", "open", "pwrite", "ftruncate")),
    (Path, ("open", "mkdir", "touch", "unlink", "rmdir", "write_text")),
)


class Killed(BaseException):
    """Ends a rank as SIGKILL does: what it calls afterwards does nothing, so nothing is cleaned up."""


class KilledRank:
    """Kills a rank at one of its calls that change a file, in whichever of its threads.

    Args:
        rank: that is killed.
        point: number of the call; 0: it is not killed.
    """

    def __init__(self, rank, point, monkeypatch):
        self.rank, self.point, self.count, self.lock = rank, point, 0, threading.Lock()
        self.here = threading.local()
        for owner, names in WATCHED:
            for name in names:
                monkeypatch.setattr(owner, name, self.watched(getattr(owner, name)))
        run, join = BackgroundSave._run, BackgroundSave.join

        def run_as_rank(save):
            self.here.rank = save._rank
            with contextlib.suppress(Killed):
                run(save)

        def join_or_die(save):
            join(save)
            if save._rank == self.rank and self.is_dead:
                raise Killed

        monkeypatch.setattr(BackgroundSave, "_run", run_as_rank)
        monkeypatch.setattr(BackgroundSave, "join", join_or_die)

    @property
    def is_dead(self):
        return 0 < self.point <= self.count

    def watched(self, call):
        @functools.wraps(call)
        def run(*args, **kwargs):
            if getattr(self.here, "rank", None) == self.rank:
                with self.lock:
                    self.count += not self.is_dead
                if self.is_dead:
                    raise Killed
            return call(*args, **kwargs)

        return run


def save(make, path, asynchronous, killed=None):
    run = make()
    if killed is not None:
        killed.here.rank = current_world().rank
    run.booster.save(path, step=2, keep_last=1, asynchronous=asynchronous)
    run.booster.wait_for_save()


# Rank 0 commits: in the background, where its thread is killed. A save at once: test_killed_save.py.
@pytest.mark.parametrize(
    ("rank", "asynchronous"),
    [(0, True), (1, False), *(pytest.param(*case, marks=pytest.mark.matrix) for case in ((0, False), (1, True)))],
)
def test_a_rank_killed_at_any_point_leaves_one_whole_step(tmp_path, monkeypatch, rank, asynchronous):
    def first(make):
        run = make()
        run.steps([0])
        run.booster.save(tmp_path / "old", step=1)

    def killed_at(point, path):
        with monkeypatch.context() as patches:
            if rank and point:  # rank 0 waits for a part that never comes
                patches.setattr(background_save, "_TIMEOUT_S", 1.0)
            killed = KilledRank(rank, point, patches)
            with contextlib.suppress(Killed):
                on_layout(lambda make: save(make, path, asynchronous, killed), **LAYOUT)
            for thread in threading.enumerate():
                if thread.name.startswith("hybridpp save"):
                    thread.join()
        assert killed.is_dead == (point > 0)
        return killed.count

    on_layout(first, **LAYOUT)
    wholes = {1: tensors_in(tmp_path / "old", 1)}
    shutil.copytree(tmp_path / "old", tmp_path / "point 0")
    num_calls = killed_at(0, tmp_path / "point 0")
    wholes[2] = tensors_in(tmp_path / "point 0", 2)
    points = sorted({1 + index * (num_calls - 1) // (NUM_POINTS - 1) for index in range(NUM_POINTS)})
    paths = [tmp_path / f"point {point}" for point in points]
    for point, path in zip(points, paths, strict=True):
        shutil.copytree(tmp_path / "old", path)
        killed_at(point, path)

    # One run goes on from each in turn: making one takes longer.
    def resumed_from_each(make):
        run = make()
        return [run.booster.resume(path).step for path in paths]

    (first_rank, second_rank), found = on_layout(resumed_from_each, **LAYOUT), set()
    assert first_rank == second_rank
    for path, step in zip(paths, first_rank, strict=True):
        tensors = tensors_in(path, step)
        assert tensors.keys() == wholes[step].keys()
        assert all(torch.equal(tensors[key], tensor) for key, tensor in wholes[step].items())
        found.add(step)
    assert num_calls >= (8 if rank == 0 else 2)
    assert found == ({1, 2} if rank == 0 else {1}), "rank 0 commits, and removes the old step after that"


def killed_process(rank, port, path, victim, asynchronous):
    """A rank; the victim kills itself before its first file is complete."""
    after_fork()
    launch(rank, 2, "127.0.0.1", port, backend="gloo", timeout_s=30)
    run = Run(**LAYOUT)
    run.steps([0])
    run.booster.save(path, step=1)
    if rank == victim:
        os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
    try:
        run.booster.save(path, step=2, asynchronous=asynchronous)
        run.steps([1, 2, 3])
        run.booster.wait_for_save()
    except PeerError:
        raise SystemExit(7) from None


@pytest.mark.covering
@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "asynchronous"])
@pytest.mark.parametrize("victim", [0, 1])
def test_the_process_that_is_left_ends_with_an_error_and_soon(tmp_path, victim, asynchronous):
    """Also where its thread waits for what the killed rank would have written."""
    context, port = multiprocessing.get_context("fork"), free_port()
    arguments = [(rank, port, tmp_path, victim, asynchronous) for rank in range(2)]
    ranks = [context.Process(target=killed_process, args=each) for each in arguments]
    start = time.monotonic()
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(60 - (time.monotonic() - start))
        assert [process.exitcode for process in ranks] == [
            (-signal.SIGKILL if rank == victim else 7) for rank in (0, 1)
        ]
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert committed_steps(tmp_path) == [1]
    assert on_layout(lambda make: resumed(make, tmp_path))[0].step == 1
