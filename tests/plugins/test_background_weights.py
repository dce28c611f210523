"""Weights that are saved in the background are those of their moment, in the same files; or one error on all ranks."""

import errno
import threading

import pytest
import torch
from divided_models import LLAMA, llama, token_batch
from hybridpp_plugins import background_weights
from run_checkpoints import on_layout
from support import assert_same, model_loss

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.checkpoint import SaveTarget
from hybridpp.cluster import Loopback
from hybridpp.errors import CheckpointError, ConfigError


@pytest.fixture
def gate(monkeypatch):
    """Writing in the background waits until it is set."""
    opened = threading.Event()
    run = background_weights.BackgroundWeights._run

    def waiting(save):
        assert opened.wait(30)
        run(save)

    monkeypatch.setattr(background_weights.BackgroundWeights, "_run", waiting)
    return opened


def contents(path):
    """Of every file, by name."""
    files = [path] if path.is_file() else sorted(path.iterdir())
    return {file.name: file.read_bytes() for file in files}


@pytest.mark.covering
@pytest.mark.parametrize("name", ["folder", "x.safetensors", "x.pt"])
@pytest.mark.parametrize("layout", [{}, {"pp_size": 2, "precision": "bf16"}, {"dp_size": 2, "zero_stage": 3}])
def test_files_are_those_of_a_save_at_that_moment(tmp_path, gate, layout, name):
    sizes = {"size_per_shard": 0.001} if name == "folder" else {}

    def rank(make):
        run = make()
        run.steps([0])
        run.booster.save_model(run.model, tmp_path / "sync" / name, **sizes)
        run.booster.save_model(run.model, tmp_path / "async" / name, use_async=True, **sizes)
        run.steps([1, 2])
        run.booster.plugin.layout.control.all_gather(torch.zeros(1))
        gate.set()
        run.booster.load_model(run.model, tmp_path / "async" / name)
        run.booster.save_model(run.model, tmp_path / "again" / name, **sizes)

    on_layout(rank, **layout)
    expected = contents(tmp_path / "sync" / name)
    assert expected
    assert contents(tmp_path / "async" / name) == contents(tmp_path / "again" / name) == expected


def test_a_model_of_transformers_is_converted_in_the_background(tmp_path):
    def rank():
        booster = Booster(plugin=HybridParallelPlugin(tp_size=2, tensor_parallel_plan=LLAMA, precision="fp32"))
        model, *_ = booster.boost(llama(), criterion=model_loss, sample=token_batch(2))
        for name in ("sync", "async"):
            booster.save_model(model, tmp_path / name, use_async=name == "async")
        booster.wait_for_save()

    Loopback(2).run(rank)
    assert contents(tmp_path / "async") == contents(tmp_path / "sync")


@pytest.mark.parametrize("call", ["step", "save", "wait_for_save"])
def test_a_full_disk_is_one_error_on_all_ranks_and_the_old_weights_stay(tmp_path, monkeypatch, gate, call):
    finish, is_full = SaveTarget.finish, threading.Event()

    def fail(target):
        if is_full.is_set():
            with target._errors_explained():
                raise OSError(errno.ENOSPC, "No space left on device")
        finish(target)

    monkeypatch.setattr(SaveTarget, "finish", fail)

    def unbroken(make):
        return make().steps(range(3))

    def rank(make):
        run = make()
        losses = run.steps([0])
        barrier = run.booster.plugin.layout.control.all_gather
        run.booster.save_model(run.model, tmp_path / "weights")
        barrier(torch.zeros(1))
        is_full.set()
        run.booster.save_model(run.model, tmp_path / "weights", use_async=True)
        gate.set()
        run.booster.plugin._saves.status.current.join()
        barrier(torch.zeros(1))
        losses += run.steps([1])
        calls = {
            "step": lambda: run.steps([2]),
            "save": lambda: run.booster.save(tmp_path / "run", step=1),
            "wait_for_save": run.booster.wait_for_save,
        }
        with pytest.raises(CheckpointError, match="No space left on device"):
            calls[call]()
        return losses + run.steps([2])

    expected = on_layout(unbroken, pp_size=2)
    assert on_layout(rank, pp_size=2) == expected
    assert [*contents(tmp_path / "weights")] == ["model.safetensors"]
    assert not (tmp_path / "run").exists()


def test_an_average_is_that_of_its_moment(tmp_path, gate):
    def rank(make):
        run = make()
        average = torch.optim.swa_utils.AveragedModel(run.model)
        expected = {name: tensor.clone() for name, tensor in average.module.state_dict().items()}
        run.booster.save_model(average, tmp_path / "average.pt", use_async=True)
        run.steps([0])
        average.update_parameters(run.model)
        gate.set()
        run.booster.wait_for_save()
        found = torch.load(tmp_path / "average.pt", weights_only=True)
        assert_same({name: found[name] for name in expected}, expected)
        with pytest.raises(ConfigError, match="use_async must be True or False: got use_async=1"):
            run.booster.save_model(run.model, tmp_path, use_async=1)

    on_layout(rank)
