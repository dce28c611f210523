"""Workers that are stopped do not outlive their rank, however it ends."""

import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.util import get_temp_dir
from pathlib import Path

import psutil
import pytest
import torch
from processes import has_ended
from torch.utils.data import Dataset

from hybridpp import HybridParallelPlugin
from hybridpp.cluster.child_processes import EndWithRank, keep_sockets_in, kill_children
from hybridpp.cluster.exit_reports import ExitReports
from hybridpp.cluster.failure_hook import FailureHook, FailureOptions
from hybridpp.cluster.rank_process import RankProcess

ENDS_S = 60.0
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="the end of a parent is a signal on Linux alone"),
]


class Numbers(Dataset[torch.Tensor]):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return torch.tensor(float(index))


def stopped_worker():
    """A worker of a plugin's data loader, which is stopped; and what keeps it."""
    plugin = HybridParallelPlugin(tp_size=1, pp_size=1, num_microbatches=1)
    options = {"num_workers": 1, "multiprocessing_context": "fork"}
    batches = iter(plugin.prepare_dataloader(Numbers(), batch_size=2, **options))
    next(batches)
    (worker,) = psutil.Process().children()
    worker.suspend()
    while worker.status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    return worker, batches


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def ended_by_the_watchdog():
    kill_children()
    os._exit(75)


class LateReports(ExitReports):
    """The workers have ended before the rank reports, so that a signal has told it so."""

    def report_error(self, error):
        for worker in psutil.Process().children():
            while not has_ended(worker.pid):
                time.sleep(0.01)


def failed():
    sys.excepthook = FailureHook(LateReports(None, 0), 1, FailureOptions())
    raise KeyError("a bug")


@pytest.mark.parametrize("end", [killed, ended_by_the_watchdog, failed])
def test_a_stopped_worker_ends_with_its_rank(end, capfd):
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def rank():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        torch.set_num_threads(1)
        worker, _ = stopped_worker()
        theirs.send(worker.pid)
        try:
            end()
        except KeyError:
            sys.excepthook(*sys.exc_info())
            sys.exit(1)

    process = context.Process(target=rank)
    process.start()
    try:
        assert ours.poll(ENDS_S)
        worker = ours.recv()
        process.join(ENDS_S)
        assert process.exitcode is not None, "the rank itself ends"
        while not has_ended(worker):
            time.sleep(0.01)
    finally:
        process.kill()
    # Not also what torch has to say of a worker that was killed.
    printed = [line for line in capfd.readouterr().err.splitlines() if "Error: " in line]
    assert printed == ["KeyError: 'a bug'"] * (end is failed)


def test_a_rank_that_another_one_kills_takes_its_stopped_workers_along():
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def rank():
        child = subprocess.Popen(["sleep", "1000"])
        child.send_signal(signal.SIGSTOP)
        theirs.send((child.pid, RankProcess.own()))
        signal.pause()

    process = context.Process(target=rank)
    process.start()
    try:
        assert ours.poll(ENDS_S)
        child, named = ours.recv()
        while psutil.Process(child).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        named.kill_with_stopped_children()
        process.join(ENDS_S)
        assert process.exitcode == -signal.SIGKILL
        while not has_ended(child):
            time.sleep(0.01)
    finally:
        process.kill()


def test_a_worker_whose_rank_has_ended_meanwhile_ends():
    def worker():
        os.getppid = lambda: 1  # of a process whose parent has ended
        EndWithRank()(0)

    process = multiprocessing.get_context("fork").Process(target=worker)
    process.start()
    process.join(ENDS_S)
    assert process.exitcode == 1


def test_the_users_own_worker_init_is_called_and_travels():
    seen = []
    EndWithRank(seen.append)(3)
    assert seen == [3]
    pickle.loads(pickle.dumps(EndWithRank(print)))(0)


def test_sockets_of_killed_workers_are_in_a_folder_that_is_removed(tmp_path):
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def rank():
        keep_sockets_in(None), keep_sockets_in(tmp_path / "no such folder"), keep_sockets_in(folder)
        torch.set_num_threads(1)
        kept = stopped_worker()  # else its end would be waited for
        theirs.send(str(get_temp_dir()))
        killed()
        del kept

    process = context.Process(target=rank)
    process.start()
    try:
        assert ours.poll(ENDS_S)
        assert ours.recv() == str(folder)
        process.join(ENDS_S)
        assert any(path.name.startswith("listener-") for path in folder.iterdir())
    finally:
        process.kill()
        shutil.rmtree(folder)
