"""A disk that is really full, and one that is really read-only, cost no checkpoint and no bit of a run."""

import re

import pytest
import torch
from mounts import fill_disk, make_read_only, on_small_disk
from run_checkpoints import on_layout

from hybridpp.checkpoint.commit import committed_steps, step_folder, steps
from hybridpp.cluster import current_world
from hybridpp.errors import CheckpointError

LAYOUTS = {"pp2": {"pp_size": 2}, "dp2 zero 1 fp16": {"dp_size": 2, "zero_stage": 1, "precision": "fp16"}}
NUM_LEFT = 64 * 1024  # so that the first files fit


def unbroken(make):
    return make().steps(range(4))


def refused(run, path, reason, asynchronous):
    """Both a new step and one that is there already."""
    for step in (2, 1):
        text = f"{re.escape(str(step_folder(path, step)))} cannot be written: .*{reason}"
        with pytest.raises(CheckpointError, match=text):
            save_and_wait(run, path, step, asynchronous)


def save_and_wait(run, path, step, asynchronous):
    run.booster.save(path, step=step, asynchronous=asynchronous)
    run.booster.wait_for_save()


def parts_refused(run, path, reason):
    """Weights and the optimizer's state by themselves."""
    for save, part, name in (
        (run.booster.save_model, run.model, "m"),
        (run.booster.save_optimizer, run.optimizer, "o"),
    ):
        with pytest.raises(CheckpointError, match=f"{re.escape(str(path / name))}.* cannot be written: .*{reason}"):
            save(part, path / name)


@pytest.mark.covering("name asynchronous")
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", ["full", "read-only"])
def test_one_error_on_all_ranks_and_the_run_and_its_checkpoint_stay(tmp_path, kind, name, asynchronous):
    reason = {"full": "No space left on device", "read-only": "Read-only file system"}[kind]

    def rank(make):
        run = make()
        barrier = run.booster.plugin.layout.control.all_gather
        losses = run.steps([0, 1])
        run.booster.save(tmp_path / "run", step=1)
        barrier(torch.zeros(1))
        if current_world().rank == 0:
            fill_disk(tmp_path, NUM_LEFT) if kind == "full" else make_read_only(tmp_path)
        barrier(torch.zeros(1))
        refused(run, tmp_path / "run", reason, asynchronous)
        parts_refused(run, tmp_path / "parts", reason)
        if kind == "read-only":  # where there is no folder yet
            refused(run, tmp_path / "new", reason, asynchronous)
        losses += run.steps([2, 3])
        again = make()
        assert again.booster.resume(tmp_path / "run").step == 1
        assert again.steps([2, 3]) == losses[2:]
        barrier(torch.zeros(1))
        if kind == "full":
            (tmp_path / "filler").unlink(missing_ok=True)
            barrier(torch.zeros(1))
            save_and_wait(again, tmp_path / "run", 3, asynchronous)
        return losses

    def child():
        losses = on_layout(rank, **LAYOUTS[name])
        assert losses == on_layout(unbroken, **LAYOUTS[name])
        expected = [3, 1] if kind == "full" else [1]
        assert steps(tmp_path / "run") == committed_steps(tmp_path / "run") == expected

    on_small_disk(tmp_path, child)
