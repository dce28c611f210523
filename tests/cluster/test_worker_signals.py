"""Workers of data loaders leave signals that tell the job to stop to their rank, and end when their rank says so."""

import multiprocessing
import platform
import runpy
import signal
import subprocess

import psutil
import pytest
import torch
from processes import RankFailed, run_forked
from support import ROOT
from torch.utils.data import DataLoader, Dataset

from hybridpp.cluster.child_processes import EndWithRank

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


def test_the_parent_ends_its_worker_by_sigterm():
    def run():
        begun_one = begun(BOTH)  # which keeps the worker
        begun_one[1].terminate()
        _, alive = psutil.wait_procs([begun_one[1]], timeout=30)
        return [one.pid for one in alive]

    assert run_forked(run) == []


def obeyed(method):
    """What a worker answers after signals from elsewhere, how its program ends, and then the worker itself."""
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    worker = context.Process(target=runpy.run_path, args=(str(WORKER), {"pipe": theirs}), daemon=True)
    worker.start()
    told = [ask(ours, "begin")]
    for name in ("TERM", "USR1"):
        send_from_elsewhere(name, worker)
        told.append(ask(ours, name))
    told.append(ask(ours, "start a program"))
    ours.send("hang")
    worker.terminate()
    worker.join(60)
    return [*told, worker.exitcode]


def ask(pipe, what):
    pipe.send(what)
    assert pipe.poll(60)
    return pipe.recv()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="for these processors")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_worker_and_its_programs_end_by_their_parents_alone(method):
    expected = ["begin", "TERM", "USR1", -signal.SIGTERM, 0]
    assert run_forked(lambda: obeyed(method), timeout_s=200) == expected
