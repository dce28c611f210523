"""Ranks that are killed, and jobs that are told to stop: the run that goes on is the one that was not disturbed."""

import json
import os
import signal

import pytest
import torch
from processes import run_ranks, run_script
from support import ROOT, sgd
from torch import nn

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.checkpoint.commit import committed_steps
from hybridpp.cluster import current_world

SCRIPT = ROOT / "tests/scripts/recovering.py"


def run(path, *arguments, ranks=2, attempt=0, monkeypatch=None):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
    path.mkdir(exist_ok=True)
    return run_script(ranks, SCRIPT, str(path), "--steps", "6", *arguments)


def result(path):
    """The loss of every step, of the last attempt that did it, and digests of all weights and optimizer states."""
    lines = [json.loads(line) for line in (path / "losses.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "step" in line}
    return losses, [file.read_text() for file in sorted(path.glob("weights-*"))]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The result of a run to which nothing happens, by its number of ranks."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for ranks in (2, 4):
            path = tmp_path_factory.mktemp("runs") / str(ranks)
            job = run(path, ranks=ranks, monkeypatch=patch)
            assert job.returncode == 0, job.stderr
            found[ranks] = result(path)
    return found


# Each place once, on ranks of both stages; all of them on all ranks are in benchmarks/failures/recovery.py. One after
# another in one run: before its second checkpoint and after, which saves that were killed must not spoil.
@pytest.mark.parametrize(
    ("ranks", "deaths", "more"),
    [
        (2, ["1:receive:2", "0:forward:3", "0:backward:3", "1:optimizer step:4"], []),
        (2, ["1:send:3", "1:save:3"], ["--asynchronous"]),
        (4, ["3:reduce:3"], []),
        pytest.param(2, ["0:save:3"], [], marks=pytest.mark.matrix),  # as test_killed_save.py
    ],
)
def test_a_run_goes_on_bit_for_bit_wherever_a_rank_was_killed(undisturbed, tmp_path, monkeypatch, ranks, deaths, more):
    for death in deaths:
        job = run(tmp_path, *more, "--die", death, ranks=ranks, monkeypatch=monkeypatch)
        assert job.returncode in (9, 1), job.stderr
        assert not list(tmp_path.glob("weights-*"))
    job = run(tmp_path, *more, ranks=ranks, attempt=1, monkeypatch=monkeypatch)
    assert job.returncode == 0, job.stderr
    assert result(tmp_path) == undisturbed[ranks]


def test_a_run_of_four_ranks_goes_on_with_two(undisturbed, tmp_path, monkeypatch):
    # Micro-batches are the same, so random numbers are: what differs is the order of sums.
    assert run(tmp_path, "--die", "0:forward:4", ranks=4, monkeypatch=monkeypatch).returncode != 0
    job = run(tmp_path, ranks=2, attempt=1, monkeypatch=monkeypatch)
    assert job.returncode == 0, job.stderr
    expected, found = undisturbed[4][0], result(tmp_path)[0]
    for step in range(1, 7):
        assert float.fromhex(found[step]) == pytest.approx(float.fromhex(expected[step]), abs=1e-6)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_process_stops_all_at_one_step(tmp_path, number):
    def steps():
        torch.manual_seed(0)
        plugin = HybridParallelPlugin(pp_size=2, num_microbatches=2)
        booster, model = Booster(plugin=plugin, device="cpu"), nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        loader = plugin.prepare_dataloader(list(torch.randn(60, 6)), batch_size=2)
        model, optimizer, criterion, loader, _ = booster.boost(model, sgd(model.parameters()), square, loader)
        data = iter(loader)
        for step in range(1, 30):
            booster.execute_pipeline(data, model, criterion, optimizer)
            optimizer.step()
            if booster.interrupted:
                booster.save(tmp_path, step=step)
                return step
            if step == 3 and current_world().rank == 1:
                os.kill(os.getpid(), number)
        return None

    stopped = run_ranks(steps, 2)
    # The batch of the fourth step was announced before; its losses come after.
    assert stopped == [4, 4]
    assert committed_steps(tmp_path) == [4]
    assert json.loads((tmp_path / "interrupted.json").read_text()) == {"step": 4, "signal": signal.Signals(number).name}


def square(outputs, inputs):
    return outputs.square().mean()
