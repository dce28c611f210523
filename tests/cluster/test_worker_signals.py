"""Workers of data loaders leave signals that tell the job to stop to their rank, and end when their rank says so."""

import ctypes
import multiprocessing
import runpy
import signal
import subprocess
import time

import psutil
import pytest
import torch
from processes import RankFailed, has_ended, run_forked
from support import ROOT
from torch.utils.data import DataLoader, Dataset

from hybridpp.cluster.child_processes import EndWithRank, kill_at_exit
from hybridpp.nn.torch_private import workers_of

WORKER = ROOT / "tests/scripts/left_to_rank.py"
BOTH = (int(signal.SIGTERM), int(signal.SIGUSR1))


class Numbers(Dataset[torch.Tensor]):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.tensor(float(index))


def send_from_elsewhere(name, process):
    """As a launcher does: the sender is no parent of the worker."""
    subprocess.run(["sh", "-c", f"kill -{name} {process.pid}"], check=True)


def begun(stop_signals):
    init = EndWithRank(None, stop_signals)
    loader = DataLoader(Numbers(), 2, num_workers=1, worker_init_fn=init, multiprocessing_context="fork")
    batches = iter(loader)
    next(batches)
    (worker,) = psutil.Process().children()
    return batches, worker


def signalled(name, stop_signals):
    """How many batches follow a signal to a worker."""
    batches, worker = begun(stop_signals)
    send_from_elsewhere(name, worker)
    return sum(1 for _ in batches)


@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_a_signal_from_elsewhere_ends_no_worker(name):
    assert run_forked(lambda: signalled(name, BOTH)) == 19


def test_other_signals_end_a_worker_and_then_its_rank():
    with pytest.raises(RankFailed):  # with torch's error, wherever its handler meets the rank
        run_forked(lambda: signalled("USR1", (int(signal.SIGTERM),)))


class Stuck(Numbers):
    def __getitem__(self, index):
        if index == 4:
            # Native code that lets no other thread of Python run.
            ctypes.PyDLL(None).sleep(1000)
        return torch.tensor(float(index))


@pytest.mark.parametrize("dataset", [Numbers(), Stuck()], ids=["idle", "stuck"])
def test_a_rank_that_ends_takes_its_workers_along(dataset):
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def rank():
        loader = DataLoader(dataset, 2, num_workers=1, worker_init_fn=EndWithRank(None, BOTH))
        batches = iter(loader)
        kill_at_exit(workers_of(batches))
        next(batches)
        theirs.send(multiprocessing.active_children()[0].pid)
        kept.append(batches)

    kept = []
    process = context.Process(target=rank)
    process.start()
    try:
        assert ours.poll(60)
        worker = ours.recv()
        process.join(60)
        assert process.exitcode == 0
        while not has_ended(worker):
            time.sleep(0.01)
    finally:
        process.kill()


def obeyed(method):
    """What a worker answers after signals from elsewhere, how its program ends, and the worker itself."""
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    worker = context.Process(target=runpy.run_path, args=(str(WORKER), {"pipe": theirs}), daemon=True)
    worker.start()
    told = [ask(ours, "begin")]
    for name in ("TERM", "USR1"):
        send_from_elsewhere(name, worker)
        told.append(ask(ours, name))
    told.append(ask(ours, "start a program"))
    worker.terminate()
    ours.send("end")
    worker.join(60)
    return [*told, worker.exitcode]


def ask(pipe, what):
    pipe.send(what)
    assert pipe.poll(60)
    return pipe.recv()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_signals_end_no_worker_but_its_programs(method):
    expected = ["begin", "TERM", "USR1", -signal.SIGTERM, 0]
    assert run_forked(lambda: obeyed(method), timeout_s=200) == expected
