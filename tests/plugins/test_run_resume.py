"""Folders that a run does not mean: of another run, of a newer version, of something else."""

import re

import pytest
from run_checkpoints import on_layout

from hybridpp.checkpoint import manifest as manifests
from hybridpp.checkpoint.commit import committed_steps, open_step, step_folder
from hybridpp.checkpoint.manifest import MANIFEST
from hybridpp.errors import CheckpointError


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
