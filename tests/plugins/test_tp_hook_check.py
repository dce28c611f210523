"""Hooks inside of sharded blocks: what is complete on every rank may be collected, the rest is refused by name."""

import pytest
import torch
from divided_models import VIT, mixtral
from support import boosted, image_batch, model_loss, sgd, tiny_vit

from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError

BATCH = image_batch(2)
IDS = torch.arange(16).reshape(2, 8) % 7
TEXT = {"input_ids": IDS, "labels": IDS}
REFUSED = r"hook .* on module '.*att.*' collects a tensor of shape .* inside of a block that is sharded"


def eager(model, **settings):
    model.config._attn_implementation = "eager"
    for name, value in settings.items():
        setattr(model.config, name, value)
    return model


def squares(outputs, inputs):
    return outputs.loss + sum(attention.square().sum((1, 2, 3)).mean() for attention in outputs.attentions)


def step(make_model, batch, criterion=model_loss, later=None, **settings):
    def run():
        booster, model, optimizer = boosted(make_model(), sgd, batch, tp_size=2, **settings)
        more = later(model) if later else {}
        return booster.execute_pipeline(iter([batch | (more or {})]), model, criterion, optimizer)["loss"].item()

    return Loopback(2 * settings.get("pp_size", 1)).run(run)


@pytest.mark.parametrize(
    "settings",
    [{}, {"tensor_parallel_plan": VIT}, {"tensor_parallel_plan": VIT, "pp_size": 2}],
    ids=["searched", "given", "cut"],
)
def test_attention_weights_of_own_heads_are_refused_by_name(settings):
    with pytest.raises(ConfigError, match=REFUSED):
        step(lambda: eager(tiny_vit(num_layers=2), output_attentions=True), BATCH, squares, **settings)


def test_attention_weights_are_right_where_a_plan_leaves_attention_whole():
    def make():
        return eager(tiny_vit(num_layers=2), output_attentions=True)

    expected = squares(make()(**BATCH), BATCH).item()
    losses = step(make, BATCH, squares, tensor_parallel_plan={"*.fc1": "column", "*.fc2": "row"})
    assert losses == pytest.approx([expected] * 2, rel=1e-5)


def test_a_switch_that_is_thrown_after_boost_is_noticed():
    def later(model):
        return {"output_attentions": True}

    with pytest.raises(ConfigError, match=REFUSED):
        step(lambda: eager(tiny_vit(num_layers=2)), BATCH, squares, later, tensor_parallel_plan=VIT)


def test_router_logits_beside_attention_weights_are_right():
    def make():
        return eager(mixtral(), output_router_logits=True, output_hidden_states=True)

    expected = make()(**TEXT).loss.item()
    for settings in ({}, {"enable_sequence_parallelism": True}):
        assert step(make, TEXT, **settings) == pytest.approx([expected] * 2, rel=1e-5)


@pytest.mark.parametrize("settings", [{}, {"enable_sequence_parallelism": True}], ids=["tensors", "sequences"])
def test_attention_weights_beside_experts_are_refused(settings):
    with pytest.raises(ConfigError, match=REFUSED):
        step(lambda: eager(mixtral(), output_attentions=True), TEXT, squares, **settings)


def test_a_script_may_collect_what_is_complete_only():
    def watching(name):
        def later(model):
            # Ranks are threads here: each has its own.
            found = []

            def collect(module, args, output):
                found.append(output)

            model.get_submodule(name).register_forward_hook(collect)

        return later

    layer = "vit.layers.1"
    for name in ("layernorm_after", "mlp.fc2", "mlp"):
        step(tiny_vit, BATCH, later=watching(f"{layer}.{name}"), tensor_parallel_plan=VIT)
    with pytest.raises(ConfigError, match=r"'vit.layers.1.mlp.fc1' collects a tensor of shape \(2, 5, 16\)"):
        step(tiny_vit, BATCH, later=watching(f"{layer}.mlp.fc1"), tensor_parallel_plan=VIT)
