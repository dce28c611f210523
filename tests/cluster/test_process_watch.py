"""A rank waits for nobody once a process of its job is lost, and stops when its launcher has ended."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing

import pytest
import torch
from killed_jobs import by_hand
from processes import run_forked, run_ranks
from support import ROOT, sgd
from torch import nn

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.checkpoint.commit import committed_steps
from hybridpp.cluster import Awaited, Progress, StopRequest, current_world, process_watch
from hybridpp.cluster.exit_reports import NO_REPORT
from hybridpp.cluster.process_watch import ProcessWatch
from hybridpp.cluster.rank_process import RankProcess
from hybridpp.cluster.shared_memory.link import Link
from hybridpp.errors import LaunchError, PeerError


@pytest.fixture
def sleeping():
    """A process, which the test may end."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def until(is_true, seconds=20.0):
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.01)


# All places, ranks and layouts, with a launcher and without: benchmarks/failures/kills.py.
@pytest.mark.covering
@pytest.mark.parametrize(
    ("layout", "place", "victim"),
    [("pp2", "connection", 1), ("tp2 pp2", "backward", 1), ("dp2", "background save", 0)],
)
def test_no_rank_outlives_a_killed_one(layout, place, victim):
    ended = by_hand(layout, place, victim, {"TORCH_CPP_LOG_LEVEL": "ERROR"})
    codes = [-signal.SIGKILL if rank == victim else 1 for rank in range(len(ended.codes))]
    assert ended.codes == codes, ended.printed
    assert f"rank {victim}" in ended.printed
    assert "is gone: its process has ended. It has reported no error: it was killed" in ended.printed


def watching(peer, monkeypatch, has_left=lambda rank: False):
    """A watch of a process that is rank 1, with short times; and what it ended this process with."""
    monkeypatch.setattr(process_watch, "_NOTICE_S", 0.05)
    monkeypatch.setattr(process_watch, "_BACKSTOP_S", 0.2)
    ends, progress = [], Progress()
    monkeypatch.setattr(process_watch, "end_process", ends.append)
    watch = ProcessWatch(progress, StopRequest())
    watch.start({1: RankProcess.of(peer.pid)})
    watch.joined(lambda rank: "", has_left)
    return watch, progress, ends


@pytest.mark.parametrize("has_descriptors", [True, False], ids=["descriptors", "polled"])
def test_a_wait_in_a_backend_ends_with_its_process_and_other_code_goes_on(sleeping, monkeypatch, has_descriptors):
    if not has_descriptors:
        monkeypatch.setattr(process_watch, "_POLL_S", 0.05)
        monkeypatch.setattr(RankProcess, "descriptor", lambda process: None)
    watch, progress, ends = watching(sleeping, monkeypatch)
    time.sleep(0.3)
    assert not progress.lost
    sleeping.kill()
    until(lambda: progress.lost)
    assert progress.lost == f"rank 1 is gone: its process has ended. {NO_REPORT}"
    time.sleep(0.8)
    assert ends == []
    progress.begin_wait(lambda: Awaited("a message", (2,), "pp"))
    until(lambda: ends)
    assert set(ends) == {1}
    watch.stop()


def test_a_rank_that_left_the_job_is_not_lost(sleeping, monkeypatch):
    asked = []
    watch, progress, ends = watching(sleeping, monkeypatch, lambda rank: not asked.append(rank))
    progress.begin_wait(lambda: Awaited("a message", (2,), "pp"))
    sleeping.kill()
    until(lambda: asked)
    time.sleep(0.5)
    watch.stop()
    assert (asked, progress.lost, ends) == ([1], "", [])


def test_a_wait_for_one_that_lives_ends_when_another_is_lost():
    sockets = socket.socketpair()
    with closing(Link(sockets[0], "rank 1", 60.0)) as link, closing(Link(sockets[1], "rank 0", 60.0)):
        link.progress = Progress()
        threading.Timer(0.2, lambda: setattr(link.progress, "lost", "rank 2 is gone.")).start()
        with pytest.raises(PeerError, match=r"^rank 2 is gone\.$"):
            link.receive(torch.zeros(1)).wait()


@pytest.mark.parametrize("asks", [True, False])
def test_a_script_that_never_asks_ends_without_its_launcher(sleeping, asks):
    def run():
        stop = StopRequest(("SIGUSR1",))
        watch = ProcessWatch(Progress(), stop, launcher=RankProcess.of(sleeping.pid))
        watch.start({})
        stop.begin_step()
        assert not asks or not stop.is_agreed
        os.kill(sleeping.pid, signal.SIGKILL)
        until(lambda: stop.own)
        stop.heard([0, stop.own])
        try:
            stop.begin_step()
        except LaunchError as error:
            return stop.own, str(error)
        return stop.own, ""

    number, text = run_forked(run)
    assert number == signal.SIGUSR1
    assert text == (
        ""
        if asks
        else f"the launcher of the ranks ({RankProcess.of(sleeping.pid)}) has ended, and the script goes on: nobody "
        "would end it. Its last steps are lost. A script that saves and ends where booster.interrupted is True loses "
        "none."
    )


def square(outputs, inputs):
    return outputs.square().mean()


def test_ranks_whose_launcher_was_killed_save_and_end(sleeping, tmp_path, monkeypatch, capfd):
    def steps():
        torch.manual_seed(0)
        plugin = HybridParallelPlugin(pp_size=2, num_microbatches=2)
        booster, model = Booster(plugin=plugin, device="cpu"), nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        model, optimizer, criterion, *_ = booster.boost(
            model, sgd(model.parameters()), square, sample=torch.randn(2, 6)
        )
        for step in range(1, 5000):
            booster.execute_pipeline(iter([torch.randn(2, 6)]), model, criterion, optimizer)
            optimizer.step()
            if booster.interrupted:
                booster.save(tmp_path, step=step)
                return step
            if step == 3 and current_world().rank == 1:
                os.kill(sleeping.pid, signal.SIGKILL)
        return None

    monkeypatch.setenv("HYBRIDPP_LAUNCHER", json.dumps(RankProcess.of(sleeping.pid)))
    stopped = run_ranks(steps, 2)
    assert stopped[0] == stopped[1] < 5000
    assert committed_steps(tmp_path) == [stopped[0]]
    assert f"hybridpp: the launcher of the ranks (process {sleeping.pid} on" in capfd.readouterr().err


def test_the_launcher_is_an_ancestor_without_the_variables_of_a_rank():
    module = str(ROOT / "hybridpp/cluster/rank_process.py")  # without torch
    script = (
        f"import runpy; R = runpy.run_path({module!r})['RankProcess']; print(R.ancestor_without({{'RANK': '7'}}).pid)"
    )
    wrapped = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {script!r}])"]
    found = subprocess.run(wrapped, env=os.environ | {"RANK": "7"}, capture_output=True, text=True, timeout=60)
    assert int(found.stdout) == os.getpid()
