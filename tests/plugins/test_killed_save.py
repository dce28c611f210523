"""A job that is killed at any call that changes a file leaves one complete checkpoint: the old one or the new one."""

import functools
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
from processes import after_fork
from run_checkpoints import on_layout, tensors_in
from support import assert_same

from hybridpp.checkpoint.commit import committed_steps, steps

LAYOUT = {"pp_size": 2}
# Every so many of the calls of a save: there are about 40, and four behind the commit. From another one in each case.
STRIDE = 4
LOCK = threading.Lock()


def saved(make, path, numbers, **arguments):
    run = make()
    if committed_steps(path):
        run.booster.resume(path)
    run.steps(numbers)
    run.booster.save(path, **arguments)
    run.booster.wait_for_save()


def counted(count, point):
    """Call it before a file changes: at the given call, the process is killed."""
    with LOCK:
        count.append(point)
        if len(count) == point:
            os.kill(os.getpid(), signal.SIGKILL)


def killed_at(point, path, step, asynchronous=False):
    """Whether a save was killed at its call number ``point``, in a process of its own; False: it had fewer calls."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
        return os.WIFSIGNALED(status)
    try:
        after_fork()
        count = []

        def watched(call):
            @functools.wraps(call)
            def run(*args, **kwargs):
                counted(count, point)
                return call(*args, **kwargs)

            return run

        for owner, names in ((os, ("fsync", "replace")), (Path, ("open", "mkdir", "touch", "unlink", "rmdir"))):
            for name in names:
                setattr(owner, name, watched(getattr(owner, name)))
        on_layout(lambda make: saved(make, path, [1], step=step, keep_last=1, asynchronous=asynchronous), **LAYOUT)
    except BaseException:
        os._exit(1)
    os._exit(0)


@pytest.mark.covering
@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "asynchronous"])
@pytest.mark.parametrize("step", [1, 2], ids=["the same step again", "the next step"])
def test_a_kill_leaves_the_old_checkpoint_or_the_new_one(tmp_path, step, asynchronous):
    on_layout(lambda make: saved(make, tmp_path / "old", [0], step=1), **LAYOUT)
    old = tensors_in(tmp_path / "old", 1)
    paths, point = [], step + 2 * asynchronous
    while True:
        paths.append(tmp_path / f"at {point}")
        shutil.copytree(tmp_path / "old", paths[-1])
        if not killed_at(point, paths[-1], step, asynchronous):
            break
        point += STRIDE
    assert point > 10
    # One run goes on from each in turn: making one takes longer.
    ((*all_done,),) = on_layout(lambda make: [run.booster.resume(path).step for run in [make()] for path in paths])
    found, news = set(), []
    for path, done in zip(paths, all_done, strict=True):
        tensors = tensors_in(path, done)
        is_old = all(tensors[key].equal(tensor) for key, tensor in old.items())
        assert done == 1 if is_old else done == step
        found.add((is_old, path != paths[-1]))
        if not is_old:
            news.append(tensors)
    assert found == {(True, True), (False, True), (False, False)}
    for tensors in news:
        assert_same(tensors, news[-1])
    assert steps(paths[-1]) == [step]


def test_the_next_save_removes_what_a_killed_one_left(tmp_path):
    on_layout(lambda make: saved(make, tmp_path, [0], step=1), **LAYOUT)
    # The first calls are of the resume.
    point = next(point for point in range(10, 60, STRIDE) if killed_at(point, tmp_path, 2) and steps(tmp_path) != [1])
    assert steps(tmp_path) == [2, 1], point
    assert committed_steps(tmp_path) == [1]
    on_layout(lambda make: saved(make, tmp_path, [1], step=3), **LAYOUT)
    assert steps(tmp_path) == committed_steps(tmp_path) == [3, 1]
