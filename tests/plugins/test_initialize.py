"""Models from scratch: each rank initialises what it owns, and the whole is the same in every layout."""

import pytest
import torch
from safetensors.torch import load_file
from support import assert_same, image_batch, model_loss, sgd, tiny_vit
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError


class Norms(nn.Sequential):
    """Blocks of torch's own modules, with buffers, and a tied head."""

    def __init__(self):
        blocks = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(2)]
        super().__init__(*blocks, nn.Linear(6, 6))
        self[2].weight = self[0][0].weight


def gpt2():
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    return GPT2LMHeadModel(
        GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0)
    )


def tokens():
    ids = torch.arange(16).reshape(2, 8)
    return {"input_ids": ids, "labels": ids}


CASES = {
    "vit": (tiny_vit, image_batch(2), model_loss),
    "gpt2": (gpt2, tokens(), model_loss),
    "torch": (Norms, torch.ones(2, 6), lambda outputs: outputs.square().mean()),
}


def initialized(kind, path, dp_size=1, seed=None, initialize=None, on_meta=True, **layout):
    """The complete weights of a model from the meta device, saved; and the loss of a step."""
    make, sample, criterion = CASES[kind]

    def run():
        torch.manual_seed(3)
        with torch.device("meta" if on_meta else "cpu"):
            model = make()
        booster = Booster(plugin=HybridParallelPlugin(num_microbatches=1, **layout), device="cpu")
        model, optimizer, *_ = booster.boost(model, sgd(model.parameters()), sample=sample)
        before = torch.random.get_rng_state()
        booster.init_model(model, seed=seed, initialize=initialize)
        assert torch.equal(torch.random.get_rng_state(), before)
        booster.save_model(model, path)
        return booster.execute_pipeline(iter([sample]), model, criterion, optimizer)["loss"].item()

    losses = Loopback(layout.get("pp_size", 1) * layout.get("tp_size", 1) * dp_size).run(run)
    assert len(set(losses)) == 1
    return load_file(path), losses[0]


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("vit", {"pp_size": 2, "tp_size": 2}),
        ("gpt2", {"pp_size": 2, "precision": "bf16"}),
        ("gpt2", {"dp_size": 2, "zero_stage": 3}),
        ("torch", {"pp_size": 2, "dp_size": 2, "zero_stage": 1}),
    ],
)
def test_initial_weights_are_the_same_in_every_layout(kind, layout, tmp_path):
    expected, loss = initialized(kind, tmp_path / "one.safetensors")
    found, other = initialized(kind, tmp_path / "many.safetensors", **layout)
    assert_same(found, expected)
    assert other == pytest.approx(loss, rel=2e-2 if "precision" in layout else 1e-6)


def test_weights_are_drawn_as_the_model_draws_them(tmp_path):
    found, _ = initialized("gpt2", tmp_path / "model.safetensors")
    layer = "transformer.h.0.{}.weight"
    assert found["transformer.wte.weight"].std() == pytest.approx(0.02, rel=0.05)
    # GPT-2 divides what ends in the residual stream by the root of twice the number of layers.
    assert found[layer.format("mlp.c_proj")].std() == pytest.approx(0.02 / 2, rel=0.05)
    assert found[layer.format("mlp.c_fc")].std() == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(found[layer.format("mlp.c_fc")], found["transformer.h.1.mlp.c_fc.weight"])
    assert torch.equal(found[layer.format("ln_1")], torch.ones(32))
    assert not found["transformer.h.0.attn.c_attn.bias"].any()


def test_the_seed_and_the_function_of_the_script_decide(tmp_path):
    expected, _ = initialized("torch", tmp_path / "a.safetensors", seed=1)
    again, _ = initialized("torch", tmp_path / "b.safetensors", seed=1, on_meta=False)
    other, _ = initialized("torch", tmp_path / "c.safetensors", seed=2)
    assert_same(again, expected)
    assert not torch.equal(other["0.0.weight"], expected["0.0.weight"])

    def ones(module):
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            nn.init.ones_(tensor)

    filled, _ = initialized("torch", tmp_path / "d.safetensors", initialize=ones, pp_size=2)
    assert all(bool((tensor == 1).all()) for tensor in filled.values())


def test_an_optimizer_trains_from_the_initial_weights(tmp_path):
    def run():
        with torch.device("meta"):
            model = tiny_vit()
        booster = Booster(plugin=HybridParallelPlugin(precision="bf16", num_microbatches=1), device="cpu")
        model, optimizer, *_ = booster.boost(model, sgd(model.parameters()))
        booster.init_model(model)
        booster.save_model(model, tmp_path / "before.safetensors")
        for _ in range(2):
            booster.execute_pipeline(iter([image_batch(2)]), model, model_loss, optimizer)
            optimizer.step()
        booster.save_model(model, tmp_path / "after.safetensors")

    run()
    before, after = (load_file(tmp_path / f"{name}.safetensors") for name in ("before", "after"))
    moved = {name: (after[name] - before[name]).abs().max().item() for name in before}
    assert 0 < max(moved.values()) < 0.5


def test_weights_that_nothing_initialises_are_named_and_none_changes():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.full((6,), 2.0))

        def forward(self, x):
            return x * self.factor

    def run():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), Scale())
        booster = Booster(plugin=HybridParallelPlugin(pp_size=2, num_microbatches=1), device="cpu")
        model, *_ = booster.boost(model, sgd(model.parameters()), sample=torch.ones(2, 6))
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        with pytest.raises(Exception, match=r"no initialisation of Scale writes to 1\.factor"):
            booster.init_model(model)
        assert_same(dict(model.named_parameters()), before)

    Loopback(2).run(run)
    booster = Booster(device="cpu")
    model, *_ = booster.boost(nn.Sequential(Scale()))
    with pytest.raises(ConfigError, match=r"Write a method reset_parameters\(\), or pass init_model"):
        booster.init_model(model)
