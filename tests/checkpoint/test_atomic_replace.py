"""A save over an older one is killed at every point: the folder holds one of the two, whole, for every reader."""

import itertools
import multiprocessing
import os
import random
import shutil
import signal
from contextlib import suppress

import pytest
from safetensors.torch import save_file
from saved import NEW, OLD, SIZES, VIT_SIZES, by_transformers, by_us, filled, leave_pickled, plain_model, save, vit
from transformers.utils import logging as transformers_logging

from hybridpp.checkpoint.hub_format import HubFormat
from hybridpp.checkpoint.index import DIFFUSION
from hybridpp.errors import CheckpointError


@pytest.fixture(autouse=True)
def quiet():
    transformers_logging.disable_progress_bar()


class Killed(BaseException):
    """What no code catches, as none runs after SIGKILL."""


class Switch:
    """Dies before the n-th thing that is asked of the file system."""

    def __init__(self, monkeypatch):
        self.left = None
        self.failure = Killed()
        # All that changes what is there; but for the writing of what does not count yet.
        self.counts = {"replace", "rename", "unlink", "rmdir", "mkdir"}
        monkeypatch.setattr(os, "fsync", lambda handle: None)  # no power is lost here
        for name in ("open", "fsync", *sorted(self.counts)):
            monkeypatch.setattr(os, name, self.counted(name, getattr(os, name)))

    def counted(self, name, call):
        def counted(*args, **options):
            if self.left is not None and name in self.counts:
                if self.left == 0:
                    self.die()
                self.left -= 1
            return call(*args, **options)

        return counted

    def die(self):
        failure, self.left = self.failure, None
        raise failure

    def kills(self, at, run):
        """Whether ``run()`` was not done before."""
        self.left = at
        with suppress(Killed, CheckpointError):
            run()
        killed, self.left = self.left is None, None
        return killed


@pytest.fixture
def switch(monkeypatch):
    return Switch(monkeypatch)


def hidden(folder):
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def kill_everywhere(switch, tmp_path, before, run, value_of):
    """Kill ``run(folder)``, on a copy of ``before``, at every point. ``value_of(folder)``: what readers find there."""
    seen, seen_after_next = [], []
    for at in itertools.count():
        folder = tmp_path / "folder"
        shutil.copytree(before, folder)
        killed = switch.kills(at, lambda folder=folder: run(folder))
        seen.append(value_of(folder))
        run(folder)
        seen_after_next.append(value_of(folder))
        assert not hidden(folder)
        shutil.rmtree(folder)
        if not killed:
            break
    old, new = value_of(before), seen[-1]
    turning = seen.index(new)
    assert 0 < turning < len(seen) - 1
    assert seen == [old] * turning + [new] * (len(seen) - turning), seen
    assert seen_after_next == [new] * len(seen)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (None, "one"),
        (None, "two"),
        ("one", "one"),
        ("one", "two"),
        ("two", "one"),
        ("two", "two"),
        ("two", "three"),
        ("three", "two"),
        ("other", "one"),
        ("other", "two"),
    ],
)
def test_a_killed_save_of_a_module_leaves_the_old_or_the_new_weights(tmp_path, switch, old, new):
    model, before = plain_model(), tmp_path / "before"
    before.mkdir()
    if old == "other":
        save_file(filled(model, OLD), before / "weights.safetensors")
    elif old:
        save(model, before, OLD, SIZES[old])
    (before / "notes.txt").write_text("mine")

    def value_of(folder):
        assert not (folder / "notes.txt").exists() or (folder / "notes.txt").read_text() == "mine"
        return by_us(model, folder)

    kill_everywhere(switch, tmp_path, before, lambda folder: save(model, folder, NEW, SIZES[new]), value_of)


@pytest.mark.parametrize(("old", "new"), [("one", "two"), ("two", "one"), ("before", "one"), ("before", "two")])
def test_a_killed_save_under_another_librarys_names_leaves_one_model(tmp_path, switch, monkeypatch, old, new):
    model, before, configs = plain_model(), tmp_path / "before", iter(range(1000))
    if old == "before":  # under the names of all models, without a config
        save(model, before, OLD)

    def write_config(folder):
        (folder / "config.json").write_text(f'{{"changed": {next(configs)}}}')

    monkeypatch.setattr("hybridpp.checkpoint.folder.format_of", lambda model: HubFormat(DIFFUSION, write_config))
    if old != "before":
        save(model, before, OLD, SIZES[old])
    switch.counts = {"replace", "unlink"}  # all that changes what is there

    def run(folder):
        save(model, folder, NEW, SIZES[new])

    kill_everywhere(switch, tmp_path, before, run, lambda folder: by_us(model, folder))


@pytest.mark.parametrize(
    ("old", "new", "num_labels"),
    [
        ("one", "two", 3),
        ("one", "one", 5),
        ("two", "three", 3),
        # Other files in the same order: the saves of a module, above.
        pytest.param("one", "two", 5, marks=pytest.mark.matrix),
        pytest.param("two", "one", 3, marks=pytest.mark.matrix),
        ("bin", "two", 3),
    ],
)
def test_a_killed_save_leaves_what_from_pretrained_reads(tmp_path, switch, old, new, num_labels):
    before = tmp_path / "before"
    before.mkdir()
    if old == "bin":
        leave_pickled(vit(), before, OLD)
    else:
        save(vit(), before, OLD, VIT_SIZES[old])

    def value_of(folder):
        found = by_transformers(folder)
        # load_model finds the same, with the model that it is for.
        assert found is None or by_us(vit(found[1]), folder) == found[0]
        return found

    switch.counts = {"replace", "unlink"}  # all that changes what is there
    kill_everywhere(
        switch, tmp_path, before, lambda folder: save(vit(num_labels), folder, NEW, VIT_SIZES[new]), value_of
    )


@pytest.mark.parametrize(("old", "new"), [("one", "two"), ("two", "one"), ("two", "two"), ("one", "one")])
def test_an_error_at_any_point_leaves_the_old_or_the_new_weights_alone(tmp_path, switch, old, new):
    model, before = plain_model(), tmp_path / "before"
    save(model, before, OLD, SIZES[old])
    switch.failure = OSError(28, "No space left on device")
    switch.counts |= {"open", "fsync"}
    found = set()
    for at in itertools.count():
        folder = tmp_path / "folder"
        shutil.copytree(before, folder)
        if not switch.kills(at, lambda folder=folder: save(model, folder, NEW, SIZES[new])):
            break
        found.add(by_us(model, folder))
        assert not hidden(folder), "cleaned up, if not by this save then by the next"
        shutil.rmtree(folder)
    assert at > 10
    assert found == {OLD, NEW}


@pytest.mark.parametrize("at", [2, 3, 4, 5, 6])
def test_sigkill_over_an_older_save(tmp_path, monkeypatch, at):
    model = plain_model()
    save(model, tmp_path, OLD)
    with monkeypatch.context() as context:
        switch = Switch(context)
        switch.die = lambda: os.kill(os.getpid(), signal.SIGKILL)
        process = multiprocessing.get_context("fork").Process(
            target=switch.kills, args=(at, lambda: save(model, tmp_path, NEW, SIZES["two"]))
        )
        process.start()
        process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert by_us(model, tmp_path) in (OLD, NEW)
    assert len(hidden(tmp_path)) == 1
    save(model, tmp_path, 3.0)
    assert by_us(model, tmp_path) == 3.0
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_one_killed_save_after_another(tmp_path, switch):
    draw, model, folder = random.Random(0), plain_model(), tmp_path / "folder"
    for _ in range(40):
        folder.mkdir()
        found = None
        for value in (1.0, 2.0, 3.0):
            size, at = draw.choice([*SIZES.values()]), draw.randrange(14)
            killed = switch.kills(at, lambda value=value, size=size: save(model, folder, value, size))
            assert by_us(model, folder) in ((found, value) if killed else (value,))
            found = by_us(model, folder)
        save(model, folder, 4.0)
        assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
        shutil.rmtree(folder)
