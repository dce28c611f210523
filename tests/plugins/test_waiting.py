"""A rank that waits for another one says for whom, and gives up in time."""

import atexit
import contextlib
import logging
import os
import re
import time

import pytest
import torch
import torch.distributed as dist
from processes import RankFailed, free_port, run_ranks
from support import boosted, image_batch, model_loss, sgd, small_vit
from torch import nn

from hybridpp import DistCoordinator, HybridParallelPlugin, launch
from hybridpp.cluster import current_world, missing_ranks
from hybridpp.cluster.exit_reports import NO_REPORT
from hybridpp.errors import HybridppError, PeerError

RAISE_IT = "raise timeout_s of launch_from_torch or launch."

TIMEOUT_S = 5.0  # also for the ranks to launch, which a busy host may keep away for seconds

MISSING = "rank 1 to make groups with it. Every rank must make the same plugins, and boost the same models"


def failure(function, *arguments):
    """The error's text with its notes, and after how many seconds it came."""
    start = time.monotonic()
    with pytest.raises(PeerError) as raised:
        function(*arguments)
    return "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])]), time.monotonic() - start


def wait_for(path):
    while not path.exists():
        time.sleep(0.02)


def notices(path, wait):
    """What rank 0 logs while it waits for rank 1, which comes when there is something."""
    logged = []
    if dist.get_rank() == 1:
        wait_for(path)
    else:
        missing_ranks.FIRST_NOTICE_S = 0.1
        missing_ranks.LOGGER.addHandler(handler := logging.Handler())
        handler.emit = lambda record: (logged.append(record.getMessage()), path.touch())
    wait()
    return logged


def _hanging_criterion(port, path):
    rank = dist.get_rank()
    DistCoordinator().destroy()
    launch(rank, 2, "127.0.0.1", port, backend="gloo", timeout_s=TIMEOUT_S)
    booster, model, optimizer = boosted(small_vit(), sgd, image_batch(2), pp_size=2, num_microbatches=2)

    def criterion(outputs, inputs):
        wait_for(path)
        return model_loss(outputs, inputs)

    step = (booster.execute_pipeline, iter([image_batch(4)]), model, criterion, optimizer)
    if rank == 0:
        seen = failure(*step)
        path.touch()
        return seen
    with contextlib.suppress(HybridppError):  # finds rank 0 gone
        step[0](*step[1:])
    return None


@pytest.mark.parametrize("shared_memory", ["1", "0"])
def test_a_hang_in_a_criterion_ends_in_time_and_tells_who_was_waited_for(monkeypatch, tmp_path, shared_memory):
    monkeypatch.setenv("HYBRIDPP_SHARED_MEMORY", shared_memory)
    port = free_port()
    text, took = run_ranks(lambda: _hanging_criterion(port, tmp_path / "seen"), 2)[0]
    assert text.startswith("rank 1 (group pp) sent nothing for 5 s, while this rank was in training step 1 of ViT"), (
        text
    )
    assert ", backward of stage 0, micro-batch 0 (0B0). It hangs, " in text, text
    assert RAISE_IT in text
    assert "hybridpp: in action 0B0 (stage, kind, micro-batch)" in text, text
    assert took > TIMEOUT_S - 0.1


def test_a_rank_that_does_not_come_to_a_barrier_is_named(tmp_path):
    port = free_port()

    def run():
        rank = dist.get_rank()
        DistCoordinator().destroy()
        launch(rank, 2, "127.0.0.1", port, backend="gloo", timeout_s=TIMEOUT_S)
        if rank == 1:
            return wait_for(tmp_path / "seen")
        seen = failure(DistCoordinator().block_all)
        (tmp_path / "seen").touch()
        return seen

    text, took = run_ranks(run, 2)[0]
    assert text.startswith("rank 1 (group all ranks) sent nothing for 5 s."), text
    assert took > TIMEOUT_S - 0.1


class _Gone:
    """A store whose process has ended."""

    def set(self, *arguments):
        raise dist.DistNetworkError("broken pipe")

    check = set


@pytest.mark.parametrize("has_store", [True, False])
def test_a_rank_that_dies_before_its_plugin_is_named(tmp_path, has_store):
    def run():
        if dist.get_rank() == 1:
            os._exit(3)
        if not has_store:
            current_world()._store = _Gone()
        (tmp_path / "seen").write_text(failure(lambda: HybridParallelPlugin(1, 2, num_microbatches=1))[0])

    with pytest.raises(RankFailed, match="rank 1 died"):
        run_ranks(run, 2)
    text, *note = (tmp_path / "seen").read_text().splitlines()
    assert text == f"rank 1 (group all ranks) is gone: its process has ended. {NO_REPORT}"
    assert note == ([f"hybridpp: rank 0 waited for {MISSING}."] if has_store else [])


def test_a_rank_that_is_late_for_its_plugin_is_named_meanwhile(tmp_path):
    def run():
        return notices(tmp_path / "logged", lambda: HybridParallelPlugin(tp_size=1, pp_size=2, num_microbatches=1))

    first, _ = run_ranks(run, 2)
    assert re.fullmatch(rf"\[rank 0\] has waited \d+ s for {re.escape(MISSING)}\.", first[0])


def test_a_rank_that_is_late_to_close_a_plugin_is_named_meanwhile(tmp_path):
    def run():
        return notices(tmp_path / "logged", HybridParallelPlugin(1, 2, num_microbatches=1).close)

    first, _ = run_ranks(run, 2)
    text = "rank 1 to close a plugin with it. Every rank must call plugin.close()."
    assert re.fullmatch(rf"\[rank 0\] has waited \d+ s for {re.escape(text)}", first[0])


@pytest.mark.parametrize("destroys", [True, False])
def test_a_save_on_the_master_alone_is_told_from_a_death(tmp_path, destroys):
    def run():
        model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)])
        booster, model, _ = boosted(model, None, torch.zeros(2, 2), pp_size=2)
        if dist.get_rank() == 0:
            time.sleep(0.3)
            return failure(booster.save_model, model, tmp_path / "weights")[0]
        if destroys:
            DistCoordinator().destroy()
        else:
            atexit._run_exitfuncs()  # as the interpreter does; a forked process has none
        return ""

    text = run_ranks(run, 2)[0]
    assert "Rank 1 left the job without an error: its script ended, or it called destroy()." in text
    assert "put no `if coordinator.is_master()` around booster.save_model" in text
    assert NO_REPORT not in text
