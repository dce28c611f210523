"""Six steps are three, a save, new objects and three more, bit for bit; and no failure costs a checkpoint or a run."""

import errno
import os
import pickle
import random
import re
import shutil

import numpy
import pytest
import torch
from hybridpp_plugins import rank_shares
from plugins.zero_models import TiedModel
from run_checkpoints import Run, on_layout, resumed, tensors_in
from support import assert_same
from torch import nn

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.checkpoint import commit, reader, writer
from hybridpp.checkpoint.commit import clean, committed_steps, open_step, step_folder, steps
from hybridpp.checkpoint.manifest import MANIFEST
from hybridpp.cluster import current_world
from hybridpp.errors import CheckpointError, ConfigError
from hybridpp.plugin import Plugin, Resumed

FP16 = {"precision": "fp16", "initial_scale": 2.0**24}  # the first steps overflow
RUNS = {
    "one fp32": {},
    "one bf16": {"precision": "bf16"},
    "one fp16": FP16,
    "offload fp32": {"offload_optimizer": 0.5},
    "pp2 zb-h1 fp16": {"pp_size": 2, "schedule": "zb-h1", **FP16},
    "tp2 pp2 bf16": {"tp_size": 2, "pp_size": 2, "precision": "bf16"},
    "dp2 fp16": {"dp_size": 2, **FP16},
    "dp2 zero 1 fp16": {"dp_size": 2, "zero_stage": 1, "ddp_bucket_cap_mb": 0.01, **FP16},
    "dp2 zero 2 bf16": {"dp_size": 2, "zero_stage": 2, "precision": "bf16"},
    "pp2 dp2 zero 1 fp16": {"pp_size": 2, "dp_size": 2, "zero_stage": 1, **FP16},
    "dp2 zero 3 fp16": {"dp_size": 2, "zero_stage": 3, **FP16},
    "pp2 dp2 zero 3 fp32": {"pp_size": 2, "dp_size": 2, "zero_stage": 3},
}


def draws():
    return random.random(), numpy.random.rand(), torch.rand(()).item()


def assert_same_run(actual, expected):
    assert actual[1] == expected[1]
    assert_same(actual[0], expected[0])


# What is left to the matrix occurs in another layout with another stage or precision.
LEFT_OUT = {"one bf16", "dp2 fp16", "dp2 zero 1 fp16", "pp2 dp2 zero 3 fp32"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.matrix) if name in LEFT_OUT else name for name in RUNS]
)
def test_three_steps_and_three_after_a_save_are_six(tmp_path, name):
    settings = RUNS[name]

    def unbroken(make):
        run = make()
        before = run.steps(range(3))
        run.booster.save(tmp_path / "a", step=3, extras={"losses": before})
        numbers = draws() if current_world().size == 1 else None
        after = run.steps(range(3, 6))
        assert len({*before, *after}) == 6
        assert run.optimizer.skipped_steps >= ("initial_scale" in settings)
        return after, run.everything(), numbers

    def in_two(make):
        torch.manual_seed(7)  # another seed of dropout, which the checkpoint's replaces
        run = make()
        run.steps([9])
        done = run.booster.resume(tmp_path / "a")
        assert done.step == 3
        assert len(done.extras["losses"]) == 3
        numbers = draws() if current_world().size == 1 else None
        return run.steps(range(3, 6)), run.everything(), numbers

    def in_three(make):
        run = make()
        run.booster.resume(tmp_path / "a")
        first = run.steps([3])
        run.booster.save(tmp_path / "b", step=4)
        run = make()
        run.booster.resume(tmp_path / "b")
        return first + run.steps([4, 5]), run.everything(), None

    expected = on_layout(unbroken, **settings)
    for others in (on_layout(in_two, **settings), on_layout(in_three, **settings)):
        for (losses, state, numbers), (other_losses, other_state, other_numbers) in zip(expected, others, strict=True):
            assert other_losses == losses
            assert_same_run(other_state, state)
            assert other_numbers in (numbers, None)


@pytest.mark.parametrize(("before", "after"), [("fp32", "bf16"), ("bf16", "fp32"), ("fp16", "bf16"), ("bf16", "fp16")])
def test_masters_are_the_weights_of_another_precision(tmp_path, before, after):
    def first(make):
        run = make(precision=before)
        run.steps(range(2))
        run.booster.save(tmp_path / "first", step=2)

    def second(make):
        run = make(precision=after)
        run.booster.resume(tmp_path / "first")
        assert run.optimizer.loss_scale == (2.0**12 if after == "fp16" else 1.0)
        run.booster.save(tmp_path / "second", step=2)
        run.steps([2])

    on_layout(first)
    on_layout(second, dp_size=2, zero_stage=1)
    first, second = (tensors_in(tmp_path / name, 2) for name in ("first", "second"))
    frozen = {key for key in first if "blocks.1." in key}  # which the precision rounds
    assert_same(
        {key: tensor for key, tensor in second.items() if key not in frozen},
        {key: tensor for key, tensor in first.items() if key not in frozen},
    )


def saved_twice(make, path):
    """Two checkpoints and the run, in the same layout as everything that follows."""
    run = make()
    for step in (1, 2):
        run.steps([step])
        run.booster.save(path, step=step)
    return run


def test_the_newest_that_is_intact_is_taken_and_the_others_are_named(tmp_path, caplog):
    on_layout(lambda make: saved_twice(make, tmp_path), pp_size=2)
    folder = step_folder(tmp_path, 2)
    names = [MANIFEST, *sorted(file.name for file in folder.glob("*.safetensors"))]
    assert len(names) == 3
    for name in names:
        data = (folder / name).read_bytes()
        flipped = bytearray(data)
        flipped[len(data) * 2 // 3] ^= 4
        (folder / name).write_bytes(flipped)
        caplog.clear()
        assert [done.step for done in on_layout(lambda make: resumed(make, tmp_path), pp_size=2)] == [1, 1]
        (record,) = caplog.records
        assert f"resuming from step 1, because later checkpoints are damaged: step 2: {name} " in record.getMessage()
        (folder / name).write_bytes(data)
    (folder / names[1]).unlink()
    assert on_layout(lambda make: resumed(make, tmp_path))[0].step == 1
    shutil.rmtree(step_folder(tmp_path, 1))
    text = f"{tmp_path} holds no checkpoint that is intact. step 2: {names[1]} is missing. Restore the files"

    def refused(make):
        run = make()
        before = run.everything()
        with pytest.raises(CheckpointError, match=re.escape(text)):
            run.booster.resume(tmp_path, missing="fresh")
        assert_same_run(run.everything(), before)

    on_layout(refused, dp_size=2)


@pytest.mark.parametrize("kind", ["nothing", "empty", "a killed save"])
def test_a_new_run_begins_where_there_is_no_checkpoint(tmp_path, kind):
    path = tmp_path / "run"
    reason = {
        "nothing": f"there is no folder {path}.",
        "empty": f"{path} is empty.",
        "a killed save": f"{path} holds no complete checkpoint, only what saves wrote that were killed or are still "
        "running, of the steps [2, 1].",
    }
    if kind != "nothing":
        path.mkdir()
    if kind == "a killed save":
        on_layout(lambda make: saved_twice(make, path))
        for step in (1, 2):
            (step_folder(path, step) / MANIFEST).unlink()

    def rank(make):
        run = make()
        with pytest.raises(CheckpointError, match=re.escape(f"{reason[kind]} Pass the folder")):
            run.booster.resume(path)
        assert run.booster.resume(path, missing="fresh") == Resumed(0, 0, 0, {})
        run.steps([0])
        run.booster.save(path, step=5)

    on_layout(rank, pp_size=2)
    assert steps(path) == [5]


@pytest.mark.parametrize(("point", "rank"), [("data", 0), ("data", 1), ("manifest", 0)])
def test_a_full_disk_is_one_error_and_neither_run_nor_checkpoints_change(tmp_path, monkeypatch, rank, point):
    full = set()

    def fail(*args, **options):
        if current_world().rank in full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args, **options)

    module, name = (writer, "_write_file") if point == "data" else (os, "replace")
    write = getattr(module, name)
    monkeypatch.setattr(module, name, fail)

    def run_rank(make):
        run = saved_twice(make, tmp_path)
        barrier = run.booster.plugin.layout.control.all_gather
        barrier(torch.zeros(1))
        before, listed = run.everything(), sorted(tmp_path.rglob("*"))
        barrier(torch.zeros(1))
        if current_world().rank == rank:
            full.add(rank)
        for step in (2, 3):
            with pytest.raises(CheckpointError, match=f"{step_folder(tmp_path, step)} cannot be written: No space"):
                run.booster.save(tmp_path, step=step)
        barrier(torch.zeros(1))
        full.clear()
        assert_same_run(run.everything(), before)
        assert sorted(tmp_path.rglob("*")) == listed
        barrier(torch.zeros(1))
        run.steps([3])
        run.booster.save(tmp_path, step=3)

    on_layout(run_rank, pp_size=2)
    assert committed_steps(tmp_path) == [3, 2, 1]


def test_what_fails_after_the_commit_does_not_undo_it(tmp_path, monkeypatch):
    """The old manifest is gone by then."""
    synced = commit.sync_path

    def fail_after_replace(path):
        if (path / MANIFEST).is_file() and not list(path.glob("*.tmp")) and is_last:
            raise OSError(errno.EIO, "Input/output error")
        synced(path)

    monkeypatch.setattr(commit, "sync_path", fail_after_replace)
    is_last = []

    def rank(make):
        run = make()
        run.booster.save(tmp_path, step=1)
        run.steps([0])
        is_last.append(True)
        with pytest.raises(CheckpointError, match="cannot be written: Input/output error"):
            run.booster.save(tmp_path, step=2)
        is_last.clear()
        assert run.booster.resume(tmp_path).step == 2

    on_layout(rank)


def test_a_file_where_the_folder_would_be_is_one_error_on_all_ranks(tmp_path):
    (tmp_path / "file").write_text("")

    def rank(make):
        with pytest.raises(CheckpointError, match=r"file/step-00000001 cannot be written: (Not a dir|File exists)"):
            saved_twice(make, tmp_path / "file")

    on_layout(rank, pp_size=2)


def test_ranks_without_a_common_file_system_are_refused(tmp_path, monkeypatch):
    """As where the path is on each host's own disk."""
    from hybridpp_plugins import folder_save

    def hosts_own(folder, save_id):
        return folder / (f"other-{save_id}" if current_world().rank else f".saving-{save_id}")

    monkeypatch.setattr(folder_save, "token_file", hosts_own)

    def rank(make):
        run = make()
        with pytest.raises(CheckpointError, match="all ranks must write to one file system"):
            run.booster.save(tmp_path, step=1)

    on_layout(rank, dp_size=2)
    assert committed_steps(tmp_path) == []


def test_a_save_whose_files_another_job_removes_says_so(tmp_path, monkeypatch):
    """Of the file system, this one knows nothing."""
    from hybridpp_plugins import folder_save

    begun, written = folder_save.begin_in, folder_save.write_holdings

    def begin_and_lose(folder, save_id):
        begun(folder, save_id)
        clean(folder, ())  # as a job does that finds no manifest here

    def lose_and_write(folder, *arguments):
        shutil.rmtree(folder, ignore_errors=True)
        return written(folder, *arguments)

    def rank(make):
        run = make()
        text = "another save to .* ran at the same time, and removed what this one had written: .*step-00000001"
        with pytest.raises(CheckpointError, match=text):
            run.booster.save(tmp_path, step=1)

    for name, replacement in (("begin_in", begin_and_lose), ("write_holdings", lose_and_write)):
        with monkeypatch.context() as patch:
            patch.setattr(folder_save, name, replacement)
            on_layout(rank, dp_size=2)
        assert committed_steps(tmp_path) == []


def test_retention_keeps_as_many_as_asked(tmp_path):
    def rank(make):
        run = make()
        for step in range(1, 6):
            run.steps([step])
            run.booster.save(tmp_path, step=step, keep_last=2)

    on_layout(rank, dp_size=2, zero_stage=1)
    assert steps(tmp_path) == committed_steps(tmp_path) == [5, 4]


def test_gradients_that_are_held_are_refused_until_they_are_dropped(tmp_path):
    def rank(make):
        run = make()
        run.steps([0])
        run.optimizer.zero_grad()
        run.booster.save(tmp_path, step=1)
        with run.booster.no_sync(run.model, run.optimizer):
            run.optimizer.step = lambda: None
            run.steps([1])
        del run.optimizer.step
        with pytest.raises(ConfigError, match=r"booster\.save was called between backward and step"):
            run.booster.save(tmp_path, step=2)
        run.optimizer.zero_grad()
        run.booster.save(tmp_path, step=2)

    on_layout(rank, dp_size=2)
    assert committed_steps(tmp_path) == [2, 1]


def test_a_resume_that_fails_while_reading_is_an_error_on_all_ranks(tmp_path, monkeypatch):
    on_layout(lambda make: saved_twice(make, tmp_path))

    fill_from = reader.fill_from

    def broken_on_rank_1(*args):
        if current_world().rank:
            raise CheckpointError("the disk is gone")
        fill_from(*args)

    monkeypatch.setattr(reader, "fill_from", broken_on_rank_1)

    def rank(make):
        with pytest.raises(CheckpointError, match="the disk is gone"):
            resumed(make, tmp_path)

    on_layout(rank, pp_size=2)


def test_nothing_in_the_folder_is_a_pickle_and_none_is_loaded(tmp_path, monkeypatch):
    on_layout(lambda make: saved_twice(make, tmp_path))
    for file in tmp_path.rglob("*"):
        if file.is_file():
            assert file.name == MANIFEST or file.suffix == ".safetensors"
            assert b"PK\x03\x04" not in file.read_bytes()[:64]

    folder = step_folder(tmp_path, 2)
    for name in ("state.pt", "manifest.pkl", "rank-00009.pt", ".metadata", "pytorch_model.bin"):
        (folder / name).write_bytes(pickle.dumps(pytest.fail))  # planted; a load would be refused below

    def refuse(*_, **__):
        raise AssertionError("a pickle is loaded")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    assert on_layout(lambda make: resumed(make, tmp_path))[0].step == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"step": -1}, "step must be a number of steps, 0 or more: got -1. Count the run's steps."),
        ({"step": 1.0}, "step must be a number of steps, 0 or more: got 1.0."),
        ({"step": 1, "keep_last": 0}, "keep_last must be a number of checkpoints, 1 or more: got 0."),
        ({"step": 1, "extras": {"model": object}}, "extras['model'] is a type, which a checkpoint cannot hold"),
    ],
)
def test_wrong_arguments_of_save(tmp_path, arguments, text):
    run = Run()
    with pytest.raises(ConfigError, match=re.escape(text)):
        run.booster.save(tmp_path / "run", **arguments)
    assert not (tmp_path / "run").exists()


def test_wrong_arguments_of_resume_and_boosters_without_runs(tmp_path):
    with pytest.raises(ConfigError, match='missing must be "error" or "fresh": got \'new\''):
        Run().booster.resume(tmp_path, missing="new")
    booster = Booster(plugin=HybridParallelPlugin())
    for call in (lambda: booster.save(tmp_path, step=1), lambda: booster.resume(tmp_path)):
        with pytest.raises(ConfigError, match=r"there is no run to save or resume\. Call booster\.boost first\."):
            call()
    model = booster.boost(nn.Linear(2, 2)).model
    booster.unboost(model)
    with pytest.raises(ConfigError, match="there is no run"):
        booster.save(tmp_path, step=1)
    with pytest.raises(ConfigError, match=r"Plugin saves no runs\. Use HybridParallelPlugin\."):
        Booster(plugin=Plugin()).resume(tmp_path)


def test_a_booster_does_not_keep_models_alive(tmp_path):
    run = Run()
    run.booster.save(tmp_path, step=1)
    run.model = run.optimizer = run.scheduler = None
    import gc

    gc.collect()
    with pytest.raises(ConfigError, match="there is no run"):
        run.booster.save(tmp_path, step=2)


@pytest.mark.parametrize("layout", [{"dp_size": 2}, {"dp_size": 2, "pp_size": 2}, {"dp_size": 3, "precision": "bf16"}])
def test_replicas_write_about_as_much_each(tmp_path, layout):
    def save(make):
        run = make()
        run.steps([0])
        run.booster.save(tmp_path, step=1)
        return run.booster.plugin.layout.here

    positions = on_layout(save, **layout)
    sizes = [0] * len(positions)
    for name, file in open_step(tmp_path, 1).files.items():
        sizes[int(name.split(".")[0].removeprefix("rank-"))] += file.nbytes
    for pp in range(layout.get("pp_size", 1)):
        written = [size for size, here in zip(sizes, positions, strict=True) if here.pp == pp]
        largest = 3 * TiedModel().embed.weight.nbytes
        assert max(written) - min(written) < largest + 4000, "no tensor is divided; headers are not counted"
        assert max(written) < 0.8 * sum(written)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_shares, "_evenly", lambda sizes, _: {})
        on_layout(lambda make: save_again(make, tmp_path / "one"), **layout)
    assert_same(tensors_in(tmp_path, 1), tensors_in(tmp_path / "one", 1))


def save_again(make, path):
    run = make()
    run.steps([0])
    run.booster.save(path, step=1)
