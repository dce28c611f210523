"""Folders that a run does not mean: of another run, of a newer version, of something else."""

import functools
import re

import pytest
import torch
from run_checkpoints import on_layout, resumed, tensors_in

from hybridpp.checkpoint import manifest as manifests
from hybridpp.checkpoint.commit import committed_steps, open_step, step_folder
from hybridpp.checkpoint.manifest import MANIFEST
from hybridpp.errors import CheckpointError, ConfigError
from hybridpp.saving import RUN_PARTS


def test_later_steps_of_another_run_stay_and_are_named_once(tmp_path, caplog):
    """Of which a resume would take the newest, and which a new run in the folder of an old one may not remove."""

    def rank(make):
        run = make()
        for step in (30, 40):
            run.booster.save(tmp_path, step=step)
        assert not caplog.records
        for step in (1, 2, 3):
            run.booster.save(tmp_path, step=step, keep_last=1)

    on_layout(rank)
    (record,) = caplog.records
    assert f"step 1 was saved to {tmp_path}, which holds later steps, [30, 40]" in record.getMessage()
    assert committed_steps(tmp_path) == [40, 30, 3]


def saved_twice(run, path):
    for step in (1, 2):
        run.booster.save(path, step=step)


def test_a_checkpoint_of_a_newer_version_is_no_damaged_one(tmp_path, monkeypatch):
    """The run would go back to the step before, and write over the newer one."""
    on_layout(lambda make: saved_twice(make(), tmp_path))
    manifest = open_step(tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr(manifests, "FORMAT", 2)
        (step_folder(tmp_path, 2) / MANIFEST).write_bytes(manifest.to_bytes())

    def rank(make):
        text = (
            "a newer version of hybridpp wrote it, in format 2, and this one reads format 1. Install that version, or"
        )
        with pytest.raises(CheckpointError, match=re.escape(text)):
            make().booster.resume(tmp_path, missing="fresh")

    on_layout(rank, pp_size=2)


@pytest.mark.parametrize(
    ("folder", "text"),
    [
        ("run/step-00000001", "It is one step: booster.resume and hybridpp checkpoint take the folder above, "),
        ("model", "It holds weights, for booster.load_model, and for hybridpp checkpoint import. Pass the folder that"),
        ("optimizer", "It holds the state of an optimizer, for booster.load_optimizer. Pass the folder that"),
    ],
)
def test_another_folder_is_named_with_what_reads_it(tmp_path, folder, text):
    def rank(make):
        run = make()
        run.steps([0])
        run.booster.save(tmp_path / "run", step=1)
        run.booster.save_model(run.model, tmp_path / "model")
        run.booster.save_optimizer(run.optimizer, tmp_path / "optimizer")
        with pytest.raises(CheckpointError, match=re.escape(text)):
            run.booster.resume(tmp_path / folder)
        if folder != "model":
            with pytest.raises(CheckpointError, match=re.escape(f"{folder} holds no weights of a model alone. It ")):
                run.booster.load_model(run.model, tmp_path / folder)
        with pytest.raises(
            CheckpointError, match=r"run holds no weights of a model alone\. It holds checkpoints of a run"
        ):
            run.booster.load_model(run.model, tmp_path / "run")

    on_layout(rank)


def test_a_link_to_a_folder_that_is_not_there_is_no_new_run(tmp_path):
    """The disk is not mounted: the run has checkpoints there."""
    (tmp_path / "disk").symlink_to(tmp_path / "mounted")

    def rank(make):
        run = make()
        path = tmp_path / "disk" / "run"
        text = r"disk is a link to .*mounted, which does not exist \(a disk that is not mounted\?\)\. "
        with pytest.raises(CheckpointError, match=f"{text}Pass the folder"):
            run.booster.resume(path, missing="fresh")
        with pytest.raises(CheckpointError, match=f"{text}Free space, or pass another path"):
            run.booster.save(path, step=1)

    on_layout(rank)


def test_a_file_in_place_of_the_folder_is_no_new_run(tmp_path):
    """Which would fail when it saves."""
    path = tmp_path / "run"
    path.write_text("notes")

    def rank(make):
        run = make()
        for missing in ("error", "fresh"):
            with pytest.raises(CheckpointError, match=r"run is a file, and checkpoints of runs are folders\. Pass the"):
                run.booster.resume(path, missing=missing)

    on_layout(rank, pp_size=2)
    assert path.read_text() == "notes"


def one_group(params):
    return torch.optim.AdamW(params, lr=0.01)


LAYOUTS = [{"pp_size": 2}, {"dp_size": 2, "zero_stage": 1, "precision": "bf16"}]


@pytest.fixture(params=LAYOUTS, ids=str)
def layout_of_run(request, tmp_path):
    """A layout that takes up a run of three steps."""

    def saves(make):
        run = make()
        run.steps(range(3))
        run.booster.save(tmp_path, step=3, extras={"best": 7})

    precision = {key: value for key, value in request.param.items() if key == "precision"}
    on_layout(saves, **precision)
    return request.param


def test_weights_alone_are_resumed_under_another_optimizer_and_schedule(layout_of_run, tmp_path):
    saved = tensors_in(tmp_path, 3)

    def run(make):
        run = make(make_optimizer=one_group)
        seed = run.optimizer.progress.seed
        found = run.booster.resume(tmp_path, parts={"model"})
        with run.booster.unsharded(run.model):
            weights = {name: p.detach().clone() for name, p in run.model.named_parameters()}
        state, counts = dict(run.optimizer.state), run.optimizer.counts
        rates = [group["lr"] for group in run.optimizer.param_groups]
        run.steps([3])  # it trains
        return found, weights, state, counts, rates, run.scheduler.last_epoch, run.optimizer.progress.seed == seed

    for found, weights, state, counts, rates, last_epoch, seed_is_own in on_layout(run, **layout_of_run):
        assert found == (3, 0, 0, {})
        assert (state, counts.applied, rates, last_epoch, seed_is_own) == ({}, 0, [0.01], 1, True)
        for name, weight in weights.items():
            stored = saved[f"model0/weights/{name}"]
            assert torch.equal(weight, stored.to(weight.dtype)), name


def test_an_optimizer_goes_on_under_another_schedule_at_its_rates(layout_of_run, tmp_path):
    def run(make):
        run = make()
        before = [group["lr"] for group in run.optimizer.param_groups]
        run.booster.resume(tmp_path, parts=("model", "optimizer", "extras"))
        after = [group["lr"] for group in run.optimizer.param_groups]
        return before, after, run.scheduler.last_epoch, run.optimizer.counts.applied, len(run.optimizer.state)

    for before, after, last_epoch, applied, num_states in on_layout(run, **layout_of_run):
        assert (before, last_epoch, applied) == (after, 0, 3)
        assert num_states > 0


def test_all_parts_by_name_are_the_whole_run(layout_of_run, tmp_path):
    def run(parts, make):
        run = make()
        found = run.booster.resume(tmp_path, parts=parts)
        return found, run.steps([3]), run.everything()[1]

    assert on_layout(functools.partial(run, RUN_PARTS), **layout_of_run) == on_layout(
        functools.partial(run, None), **layout_of_run
    )


@pytest.mark.parametrize("parts", ["model", {"weights"}, (), ["model", "scheduler"], 3])
def test_unknown_parts_list_those_that_there_are(parts, tmp_path):
    message = (
        f"parts names what is resumed of a checkpoint, as in parts={{'model', 'optimizer'}}: got parts={parts!r}. "
        "There are model, optimizer, lr_scheduler, dataloader, generators, extras."
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        on_layout(lambda make: resumed(make, tmp_path, missing="fresh", parts=parts))


def test_ranks_that_resume_other_parts_are_refused_alike(tmp_path):
    def run(make):
        run = make()
        parts = {"model"} if run.replica else {"model", "optimizer"}
        with pytest.raises(ConfigError) as refused:
            run.booster.resume(tmp_path, missing="fresh", parts=parts)
        return str(refused.value)

    message = (
        "all ranks must resume the same parts: rank 0 has parts=['model', 'optimizer'], rank 1 parts=['model']. Pass "
        "the same on every rank."
    )
    assert on_layout(run, dp_size=2) == [message] * 2
