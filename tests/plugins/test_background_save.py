"""A save in the background is the checkpoint of its moment, whatever the run does meanwhile; or one error."""

import errno
import re
import threading

import pytest
import torch
from hybridpp_plugins import background_save
from run_checkpoints import on_layout, tensors_in
from support import assert_same

from hybridpp.checkpoint import file_images
from hybridpp.checkpoint.commit import committed_steps, open_step, step_folder, steps
from hybridpp.errors import CheckpointError, ConfigError, RefusedByPeerError

LAYOUTS = {
    "one": {},
    "pp2 bf16": {"pp_size": 2, "precision": "bf16"},
    "dp2 zero 1": {"dp_size": 2, "zero_stage": 1},
    "tp2": {"tp_size": 2},
}


@pytest.fixture
def gate(monkeypatch):
    """Writing in the background waits until it is set."""
    opened = threading.Event()
    run = background_save.BackgroundSave._run

    def waiting(save):
        assert opened.wait(30)
        run(save)

    monkeypatch.setattr(background_save.BackgroundSave, "_run", waiting)
    return opened


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_run_goes_on_and_the_checkpoint_is_that_of_its_moment(tmp_path, gate, name):
    def rank(make):
        run = make()
        run.steps([0])
        run.booster.save(tmp_path / "sync", step=1)
        run.booster.save(tmp_path / "async", step=1, asynchronous=True)
        assert committed_steps(tmp_path / "async") == []
        run.steps([1, 2])
        run.booster.plugin.layout.control.all_gather(torch.zeros(1))
        gate.set()
        run.booster.wait_for_save()
        run.booster.wait_for_save()
        assert committed_steps(tmp_path / "async") == [1]

    on_layout(rank, **LAYOUTS[name])
    assert_same(tensors_in(tmp_path / "async", 1), tensors_in(tmp_path / "sync", 1))
    manifests = [open_step(tmp_path / name, 1) for name in ("async", "sync")]
    assert [[*manifest.files.values()] for manifest in manifests] == [[*manifests[0].files.values()]] * 2, "digests"
    left = {file.suffix for file in step_folder(tmp_path / "async", 1).iterdir()}
    assert left == {".json", ".safetensors"}
    assert len(list(step_folder(tmp_path / "async", 1).glob("*.json"))) == 1


def test_the_next_save_and_resume_wait_for_it_and_retention_holds(tmp_path):
    def rank(make):
        run = make()
        for step in range(1, 5):
            run.steps([step])
            run.booster.save(tmp_path, step=step, asynchronous=True, keep_last=2)
        assert run.booster.resume(tmp_path).step == 4
        expected = run.steps([5])
        run.booster.plugin.close()
        run = make()
        run.booster.resume(tmp_path)
        assert run.steps([5]) == expected

    on_layout(rank, pp_size=2)
    assert steps(tmp_path) == committed_steps(tmp_path) == [4, 3]


@pytest.mark.covering("call is_told")
@pytest.mark.parametrize("call", ["wait_for_save", "save"])
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("is_told", [True, False])
def test_a_full_disk_is_an_error_on_all_ranks_and_costs_nothing(tmp_path, monkeypatch, call, failing, is_told):
    """Also where the rank that fails cannot tell rank 0."""
    is_full = threading.Event()
    write, leave = file_images._write_image, background_save.BackgroundSave._leave

    def fail(path, image, after_block):
        if is_full.is_set() and path.name.startswith(f"rank-0000{failing}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, image, after_block)

    def leave_or_fail(save, part):
        if not is_told and is_full.is_set() and save._rank == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        leave(save, part)

    monkeypatch.setattr(file_images, "_write_image", fail)
    monkeypatch.setattr(background_save.BackgroundSave, "_leave", leave_or_fail)

    def rank(make):
        run = make()
        barrier = run.booster.plugin.layout.control.all_gather
        run.booster.save(tmp_path, step=1)
        barrier(torch.zeros(1))
        is_full.set()
        run.booster.save(tmp_path, step=1, asynchronous=True)
        run.steps([0])
        with pytest.raises(CheckpointError, match="No space left on device"):
            run.booster.wait_for_save() if call == "wait_for_save" else run.booster.save(tmp_path, step=2)
        barrier(torch.zeros(1))
        is_full.clear()
        barrier(torch.zeros(1))
        assert run.booster.resume(tmp_path).step == 1
        run.booster.save(tmp_path, step=3, asynchronous=True)
        run.booster.wait_for_save()

    on_layout(rank, pp_size=2)
    assert steps(tmp_path) == committed_steps(tmp_path) == [3, 1]
    assert not list(tmp_path.rglob("part-*"))


@pytest.mark.covering
@pytest.mark.parametrize("failing", [0, 1, None])
@pytest.mark.parametrize("layout", [{"pp_size": 2}, {"dp_size": 2, "zero_stage": 1, "precision": "fp16"}])
def test_all_ranks_commit_or_raise_at_the_same_step(tmp_path, monkeypatch, gate, layout, failing):
    """Told in the message of a step; what failed costs no batch and no gradient, and the next steps are as ever."""
    write = file_images._write_image

    def fail(path, image, after_block):
        if path.name.startswith(f"rank-0000{failing}"):
            raise OSError(errno.EROFS, "Read-only file system")
        return write(path, image, after_block)

    monkeypatch.setattr(file_images, "_write_image", fail)

    def unbroken(make):
        return make().steps(range(4))

    def rank(make):
        run = make()
        losses = run.steps([0])
        run.booster.save(tmp_path, step=1, asynchronous=True)
        losses += run.steps([1])
        gate.set()
        status = run.booster.plugin._saves.status
        background = status.current
        background.join()
        run.booster.plugin.layout.control.all_gather(torch.zeros(1))
        assert status.current is background
        losses += run.steps([2])
        if failing is not None:
            with pytest.raises(CheckpointError, match="Read-only file system"):
                run.steps([3])
        losses += run.steps([3])
        assert status.current is None
        run.booster.wait_for_save()
        return losses

    expected = on_layout(unbroken, **layout)
    assert on_layout(rank, **layout) == expected
    assert committed_steps(tmp_path) == ([1] if failing is None else [])


def test_a_step_that_ended_on_another_rank_does_not_end_it(tmp_path, gate):
    """The other rank lives, and the script goes on."""
    failing = [True]

    def rank(make):
        run = make()
        run.steps([0])
        run.booster.save(tmp_path, step=1, asynchronous=True)
        fails = run.replica == 1
        if fails:
            run.model.register_forward_pre_hook(lambda *_: 1 / 0 if failing else None)
        with pytest.raises(ZeroDivisionError if fails else RefusedByPeerError):
            run.steps([1])
        failing.clear()
        run.steps([2])
        run.booster.plugin.layout.control.all_gather(torch.zeros(1))
        gate.set()
        run.booster.wait_for_save()

    on_layout(rank, dp_size=2)
    assert committed_steps(tmp_path) == [1]


def test_one_that_was_given_up_is_an_error_on_all_ranks(tmp_path, monkeypatch):
    """A rank that did not answer in time may answer later: rank 0 has not waited for its part then."""
    leave, given_up = background_save.BackgroundSave._leave, threading.Event()
    save_of_rank_0 = []

    def leave_late(save, part):
        if save._rank == 1 and save._folder.name.endswith("1"):
            assert given_up.wait(30)
            save_of_rank_0[0].join()
        leave(save, part)

    monkeypatch.setattr(background_save.BackgroundSave, "_leave", leave_late)

    def rank(make):
        run = make()
        saves = run.booster.plugin._saves
        run.booster.save(tmp_path, step=1, asynchronous=True)
        if run.replica == 0:
            save_of_rank_0.append(saves.status.current)
            saves.give_up()
            given_up.set()
        run.booster.plugin.layout.control.all_gather(torch.zeros(1))
        with pytest.raises(CheckpointError, match="was given up when another rank was taken to be gone"):
            run.booster.wait_for_save()
        run.booster.save(tmp_path, step=2, asynchronous=True)
        run.booster.wait_for_save()

    on_layout(rank, dp_size=2)
    assert committed_steps(tmp_path) == [2]


def test_a_rank_that_never_writes_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(background_save, "_TIMEOUT_S", 0.1)
    monkeypatch.setattr(background_save.BackgroundSave, "_leave", lambda save, part: None)
    save = background_save.BackgroundSave(
        background_save.SavingRank(0, 2, 2), tmp_path, "01234567", lambda *_: {}, lambda written: {}, print
    )
    save.join()
    assert re.search("rank 0 has written nothing for 0 s", str(save.failure))


def test_a_rank_that_still_writes_is_waited_for(tmp_path, monkeypatch):
    """However long a large part takes: the time limit begins again whenever its files have grown."""
    file, size_of = tmp_path / "rank-00000.01234567.00000.safetensors", background_save.BackgroundSave._size_of
    file.touch()
    sizes = []

    def grown(save, rank):
        sizes.append(size_of(save, rank))
        if len(sizes) < 4:
            file.write_bytes(b"x" * (1 + len(sizes)))
        return size_of(save, rank)

    monkeypatch.setattr(background_save, "_TIMEOUT_S", 0.01)
    monkeypatch.setattr(background_save.BackgroundSave, "_leave", lambda save, part: None)
    monkeypatch.setattr(background_save.BackgroundSave, "_size_of", grown)
    save = background_save.BackgroundSave(
        background_save.SavingRank(0, 1, 1), tmp_path, "01234567", lambda *_: {}, lambda written: {}, print
    )
    save.join()
    assert "rank 0 has written nothing for 0 s" in str(save.failure)
    assert len(sizes) == 4


def test_asynchronous_is_a_bool(tmp_path):
    def rank(make):
        run = make()
        with pytest.raises(ConfigError, match="asynchronous must be True or False: got asynchronous=1"):
            run.booster.save(tmp_path, step=1, asynchronous=1)

    on_layout(rank)
