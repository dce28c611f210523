"""Folders of models of other libraries are read by these, and by load_model."""

import logging
from functools import cache

import pytest
import torch
from huggingface_hub import PyTorchModelHubMixin
from safetensors.torch import load_file
from support import assert_near, assert_same, sgd
from torch import nn

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.checkpoint import SaveTarget
from hybridpp.cluster import Loopback
from hybridpp.errors import CheckpointError


class Layers(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@cache
def denoiser():
    """A class of diffusers' kind."""
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed: `make others` installs it")

    class Denoiser(diffusers.ModelMixin, diffusers.ConfigMixin):
        @diffusers.configuration_utils.register_to_config
        def __init__(self, width=20, depth=2):
            super().__init__()
            self.inner = Layers(width, depth)

        def forward(self, x):
            return self.inner(x)

    return Denoiser


class Shared(Layers, PyTorchModelHubMixin):
    def __init__(self, width=20, depth=2):
        super().__init__(width, depth)


class OwnFormat(Shared):
    def _save_pretrained(self, save_directory):
        raise AssertionError("called with a part of the model")


def shared():
    return Shared


@pytest.mark.parametrize("kind_of", [denoiser, shared])
@pytest.mark.parametrize(
    "layout", [{}, {"pp_size": 2}, {"tp_size": 2, "tensor_parallel_plan": {"*layers.*": "gathered_column"}}], ids=str
)
def test_a_folder_is_read_by_the_models_own_from_pretrained(kind_of, layout, tmp_path):
    kind = kind_of()
    batch = torch.ones(2, 6), torch.zeros(2, 6)

    def run():
        torch.manual_seed(0)
        plugin = HybridParallelPlugin(num_microbatches=1, **layout)
        booster, model = Booster(plugin=plugin, device="cpu"), kind(width=6, depth=4)
        model, optimizer, loss, *_ = booster.boost(model, sgd(model.parameters()), nn.MSELoss(), sample=batch)
        booster.execute_pipeline(iter([batch]), model, loss, optimizer)
        optimizer.step()
        booster.save_model(model, tmp_path)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        booster.load_model(model, tmp_path)
        assert_same(before, dict(model.state_dict()))
        with torch.no_grad():
            return booster.execute_pipeline(iter([batch]), model, return_loss=False, return_outputs=True)["outputs"]

    *_, outputs = Loopback(layout.get("pp_size", 1) * layout.get("tp_size", 1)).run(run)
    read = kind.from_pretrained(tmp_path)
    assert_near({"outputs": outputs}, {"outputs": read(batch[0]).detach()})


def weights(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(("kind_of", "count"), [(denoiser, 3), (shared, 1)])
def test_several_files_are_written_only_where_they_are_read(kind_of, count, tmp_path):
    model = kind_of()()
    SaveTarget(tmp_path, model).write(weights(model), None, "1KB")
    assert len(list(tmp_path.glob("*.safetensors"))) == count
    assert_same(weights(type(model).from_pretrained(tmp_path)), weights(model))


def test_a_save_over_a_folder_of_other_names_leaves_one_model(tmp_path):
    old, new = denoiser()(), denoiser()()
    SaveTarget(tmp_path, nn.Linear(1, 1)).write(weights(old), None, "1GB")  # as this library saved it before
    SaveTarget(tmp_path, new).write(weights(new), None, "1KB")
    SaveTarget(tmp_path, new).write(weights(new), None, "1GB")
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == ["diffusion_pytorch_model.safetensors"]
    assert_same(weights(denoiser().from_pretrained(tmp_path)), weights(new))


def test_a_class_that_saves_itself_otherwise_is_named(tmp_path, caplog):
    model = OwnFormat()
    with caplog.at_level(logging.WARNING):
        SaveTarget(tmp_path, model).write(weights(model), None, "1GB")
    assert "OwnFormat has a _save_pretrained of its own, which is not called" in caplog.text
    assert_same(load_file(tmp_path / "model.safetensors"), weights(model))


def test_a_save_writes_through_no_link_of_the_folder(tmp_path):
    class Nested(denoiser()):
        def save_config(self, folder):
            (folder / "more").mkdir()
            (folder / "more" / "notes").write_text("new")

    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "folder"
    elsewhere.mkdir()
    folder.mkdir()
    (folder / "more").symlink_to(elsewhere)
    model = Nested()
    with pytest.raises(CheckpointError, match="more is a link, through which a save does not write"):
        SaveTarget(folder, model).write(weights(model), None, "1GB")
    assert not any(elsewhere.iterdir())
