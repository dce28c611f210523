"""The newest checkpoint that is intact counts, whatever killed saves and full disks left around it."""

import errno
import os
from contextlib import suppress

import pytest
from checkpoint_folders import full_holding, save, tensors_of

from hybridpp.checkpoint import commit as commits
from hybridpp.checkpoint.commit import begin, commit, committed_steps, open_step, remove_old, step_folder, steps
from hybridpp.checkpoint.manifest import MANIFEST
from hybridpp.checkpoint.reader import fill, plan_reads, verify_file
from hybridpp.errors import CheckpointError


def intact(path, step, seed):
    """Whether a step's checkpoint is complete, with the tensors of a seed."""
    manifest = open_step(path, step)
    for name in manifest.files:
        verify_file(step_folder(path, step), manifest, name)
    targets = {key: tensor.clone().zero_() for key, tensor in tensors_of(0).items()}
    reads = plan_reads(manifest.tensors, [full_holding(key, target) for key, target in targets.items()])
    fill(step_folder(path, step), reads)
    return all(targets[key].equal(tensor) for key, tensor in tensors_of(seed).items())


def files_in(path):
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


def test_steps_are_listed_newest_first_and_only_with_a_manifest(tmp_path):
    assert steps(tmp_path / "nothing") == []
    for step in (5, 120, 30):
        save(tmp_path, step)
    begin(tmp_path, 200, "01234567")
    (tmp_path / "step-7").mkdir()
    (tmp_path / "notes").write_text("mine")
    assert steps(tmp_path) == [200, 120, 30, 5]
    assert committed_steps(tmp_path) == [120, 30, 5]
    assert steps(tmp_path / "notes") == [], "of a file"


def test_a_folder_under_another_number_is_no_checkpoint(tmp_path):
    save(tmp_path, 5)
    step_folder(tmp_path, 5).rename(step_folder(tmp_path, 9))
    with pytest.raises(CheckpointError, match=r"manifest\.json is of step 5"):
        open_step(tmp_path, 9)


@pytest.mark.parametrize("point", range(1, 8))
def test_a_second_save_of_a_step_that_dies_leaves_the_first_or_is_complete(tmp_path, monkeypatch, point):
    """At every call that makes something durable."""
    save(tmp_path, 5, seed=1)
    count = 0

    def dying(call):
        def run(*args):
            nonlocal count
            count += 1
            if count == point:
                raise KeyboardInterrupt
            return call(*args)

        return run

    with monkeypatch.context() as patch:
        for name in ("fsync", "replace"):
            patch.setattr(os, name, dying(getattr(os, name)))
        with suppress(KeyboardInterrupt):
            save(tmp_path, 5, seed=2)
    assert count >= point or point == 7
    assert intact(tmp_path, 5, 1) != intact(tmp_path, 5, 2)
    current = save(tmp_path, 5, seed=3)
    assert remove_old(tmp_path, current, None) == []
    assert intact(tmp_path, 5, 3)
    assert len(files_in(tmp_path)) == 1 + len(current.files)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS])
def test_a_manifest_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch, error):
    save(tmp_path, 5, seed=1)

    def refuse(*_):
        raise OSError(error, "refused")

    with monkeypatch.context() as patch:
        patch.setattr(commits.os, "replace", refuse)
        with pytest.raises(OSError, match="refused"):
            save(tmp_path, 5, seed=2)
    assert intact(tmp_path, 5, 1)
    assert not [name for name in files_in(tmp_path) if name.endswith(".tmp")]


def test_retention_keeps_the_newest_and_what_is_not_ours(tmp_path):
    for step in (10, 20, 30, 40):
        current = save(tmp_path, step)
    (step_folder(tmp_path, 10) / "mine.txt").write_text("mine")
    begin(tmp_path, 15, "01234567")
    assert remove_old(tmp_path, current, 2) == []
    assert committed_steps(tmp_path) == [40, 30]
    assert files_in(step_folder(tmp_path, 10)) == ["mine.txt"]
    assert steps(tmp_path) == [40, 30, 10]


def test_retention_never_removes_the_checkpoint_that_was_just_written(tmp_path):
    """Nor later ones, which are of another run, or damaged."""
    for step in (50, 60, 70, 55):
        current = save(tmp_path, step)
    remove_old(tmp_path, current, 1)
    assert committed_steps(tmp_path) == [70, 60, 55]
    current = save(tmp_path, 57)
    remove_old(tmp_path, current, 2)
    assert committed_steps(tmp_path) == [70, 60, 57, 55]


@pytest.mark.parametrize("change", ["removed", "cut"])
def test_a_checkpoint_whose_files_another_job_removed_does_not_count(tmp_path, change):
    manifest = save(tmp_path, 5)
    (name, *_) = manifest.files
    file = step_folder(tmp_path, 5) / name
    (step_folder(tmp_path, 5) / MANIFEST).unlink()
    if change == "removed":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"{name} was removed or changed .*Let only one job save to {tmp_path}"):
        commit(tmp_path, manifest)
    assert committed_steps(tmp_path) == []


def test_a_checkpoint_does_not_count_while_it_is_removed(tmp_path, monkeypatch):
    for step in (10, 20):
        current = save(tmp_path, step)

    def refuse(*_):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(commits, "clean", refuse)
    (problem, _) = remove_old(tmp_path, current, 1)
    assert problem.endswith("Permission denied")
    assert committed_steps(tmp_path) == [20]
    assert not (step_folder(tmp_path, 10) / MANIFEST).exists()
