"""Copies and averages of a boosted model, and the names under which scripts look for a model in a wrapper."""

import copy
import gc
import io
import re

import pytest
import torch
from safetensors.torch import load_file, save
from support import assert_near, assert_same, boosted, gradients_of, image_batch, model_loss, sgd, tiny_vit
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers.modeling_utils import unwrap_model

from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError

PLAN = {"*.[qkv]_proj": "column", "*.o_proj": "row", "*.fc1": "column", "*.fc2": "row"}
LAYOUTS = [{}, {"pp_size": 2}, {"tp_size": 2, "tensor_parallel_plan": PLAN}]


def averaged(model):
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))


def on_ranks(settings, run):
    return Loopback(settings.get("pp_size", 1) * settings.get("tp_size", 1)).run(run)


@pytest.mark.covering
@pytest.mark.parametrize("settings", LAYOUTS, ids=["one", "pp2", "tp2"])
@pytest.mark.parametrize("kind", [averaged, copy.deepcopy])
def test_an_average_of_a_boosted_model_is_saved_whole(tmp_path, settings, kind):
    def run():
        booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2), **settings)
        average = kind(model)
        for seed in range(2):
            booster.execute_pipeline(iter([image_batch(4, seed)]), model, model_loss, optimizer)
            optimizer.step()
            if kind is averaged:
                average.update_parameters(model)
        booster.save_model(average, tmp_path / "x.safetensors")
        booster.save_model(model, tmp_path / "model.safetensors")
        return average.state_dict()

    states = on_ranks(settings, run)
    saved = load_file(tmp_path / "x.safetensors")
    if kind is copy.deepcopy:
        assert_same(saved, tiny_vit().state_dict())
        return
    assert_near(saved, by_hand())
    assert_near(load_file(tmp_path / "model.safetensors"), by_hand(decay=0.0))
    for state in states:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        assert_same(torch.load(buffer, weights_only=True), state)
        assert save(state)


@pytest.mark.parametrize("settings", [{"pp_size": 2}, {"tp_size": 2, "tensor_parallel_plan": PLAN}], ids=["pp2", "tp2"])
def test_an_average_goes_on_from_what_was_saved_in_another_layout(tmp_path, settings):
    def train(booster, model, optimizer, average, seed):
        booster.execute_pipeline(iter([image_batch(4, seed)]), model, model_loss, optimizer)
        optimizer.step()
        average.update_parameters(model)

    booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2))
    average = averaged(model)
    train(booster, model, optimizer, average, 0)
    booster.save(tmp_path / "run", step=1)
    booster.save_model(average, tmp_path / "average")

    def run():
        booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2), **settings)
        average = averaged(model)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        booster.load_model(average, tmp_path / "average")
        assert_same(dict(model.named_parameters()), before)
        booster.resume(tmp_path / "run")
        train(booster, model, optimizer, average, 1)
        booster.save_model(average, tmp_path / "x.safetensors")

    on_ranks(settings, run)
    assert_near(load_file(tmp_path / "x.safetensors"), by_hand())


def by_hand(decay=0.5):
    """The average, in one process and plain torch."""
    model = tiny_vit()
    optimizer = sgd(model.parameters())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    for seed in range(2):
        model(**image_batch(4, seed)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return average.module.state_dict()


def test_a_copy_whose_original_is_gone_cannot_be_saved(tmp_path):
    booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2))
    average = copy.deepcopy(copy.deepcopy(model))
    del model, optimizer
    gc.collect()
    with pytest.raises(ConfigError, match="this ViTForImageClassification is a copy of a boosted model that no longer"):
        booster.save_model(average, tmp_path)


@pytest.mark.parametrize("settings", [{"precision": "fp16"}, {"error_if_nonfinite": True}], ids=["fp16", "finite"])
def test_a_copy_is_made_where_the_calls_of_the_original_are_recorded(settings):
    booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2), **settings)
    booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)
    other = copy.deepcopy(model)
    assert_same(other.state_dict(), model.state_dict())
    with torch.no_grad():
        assert torch.equal(other(**image_batch(2)).logits, model(**image_batch(2)).logits)
        other.classifier.bias += 1.0
        assert not torch.equal(other(**image_batch(2)).logits, model(**image_batch(2)).logits)


def test_a_copy_does_not_train(tmp_path):
    booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2))
    for other in (copy.deepcopy(model), averaged(model)):
        with pytest.raises(ConfigError, match="was not boosted by this booster"):
            booster.execute_pipeline(iter([image_batch(2)]), other, model_loss, optimizer)


def test_a_boosted_model_is_what_scripts_look_for_in_a_wrapper():
    plain = tiny_vit()
    names = [name for name, _ in plain.named_modules()]
    state = list(plain.state_dict())
    booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2))
    assert model.unwrap() is model
    assert model.module is model
    assert [name for name, _ in model.named_modules()] == names
    assert list(model.state_dict()) == state
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)
    plain(**image_batch(4)).loss.backward()
    assert_near(gradients_of(booster, model), {name: p.grad for name, p in plain.named_parameters()})
    other = copy.deepcopy(model)
    assert other.unwrap() is other
    assert other.module is other
    assert str(model) == str(plain)
    assert unwrap_model(model) is model, "as transformers does in save_pretrained"


class Own(nn.Module):
    """Has such names itself."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(4, 4)

    def unwrap(self):
        return "mine"

    def forward(self, x):
        return self.module(x)


def test_what_the_model_has_under_such_a_name_stays():
    _, model, _ = boosted(Own(), sgd, torch.ones(2, 4))
    assert isinstance(model.module, nn.Linear)
    assert model.unwrap() == "mine"
    assert list(model.state_dict()) == ["module.weight", "module.bias"]


def test_words_that_scripts_have_for_a_save(tmp_path):
    booster, model, _ = boosted(tiny_vit(), sgd, image_batch(2))
    booster.save_model(
        model, tmp_path, shard=True, gather_dtensor=True, prefix=None, use_safetensors=True, use_async=False
    )
    booster.save_model(model, tmp_path / "x.pt", use_safetensors=False)
    booster.load_model(model, tmp_path, low_cpu_mem_mode=True)
    for words, text in [
        ({"prefix": "../mine"}, "prefix must be the name of a folder to make in the path: got '../mine'"),
        ({"gather_dtensor": False}, "gather_dtensor=False is not supported: saved weights are unsharded"),
        ({"use_async": "yes"}, "use_async must be True or False: got use_async='yes'"),
        (
            {"use_safetensors": False},
            f"does not fit the path: {tmp_path} is written as safetensors. Leave it out",
        ),
        ({"use_safetensors": "no"}, "use_safetensors must be True or False: got use_safetensors='no'"),
        ({"shard": 1}, "shard must be True or False: got shard=1"),
        (
            {"size_per_shard": "1GB"},
            "size_per_shard must be a number of MB above 0: got '1GB'. Use, for example, 1024.",
        ),
        ({"size_per_shard": 0}, "size_per_shard must be a number of MB above 0: got 0."),
    ]:
        with pytest.raises(ConfigError, match=re.escape(text)):
            booster.save_model(model, tmp_path, **words)
    with pytest.raises(ConfigError, match=r"x.pt is written as a pickle file of torch.save. Leave it"):
        booster.save_model(model, tmp_path / "x.pt", use_safetensors=True)
    with pytest.raises(
        ConfigError, match=r"low_cpu_mem_mode=False is not supported: each rank reads only what it owns"
    ):
        booster.load_model(model, tmp_path, low_cpu_mem_mode=False)
