"""Hooks inside of sharded blocks: what is complete on every rank may be collected, the rest is refused by name."""

import pytest
import torch
from divided_models import VIT, mixtral
from support import assert_near, boosted, image_batch, model_loss, sgd, tiny_vit, train, trained_alone

from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError
from hybridpp.tensor_parallel import sharding_of

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


def with_attentions():
    return eager(tiny_vit(num_layers=2), output_attentions=True)


@pytest.mark.parametrize("settings", [{}, {"enable_sequence_parallelism": True}], ids=["tensors", "sequences"])
def test_a_loss_of_attention_weights_trains_as_in_one_process(settings):
    expected = trained_alone(with_attentions, [BATCH], criterion=squares)
    found = train(with_attentions, [BATCH], criterion=squares, tp_size=2, **settings)
    assert found["losses"][0] == pytest.approx(expected["losses"][0], rel=1e-5)
    assert_near(found["gradients"], expected["gradients"], 1e-5)


def test_layers_whose_result_a_hook_collects_stay_whole():
    def make():
        model = tiny_vit(num_layers=2)
        found = []
        model.vit.layers[1].mlp.fc1.register_forward_hook(lambda module, args, output: found.append(output))
        return model

    def run():
        booster, model, optimizer = boosted(make(), sgd, BATCH, tp_size=2)
        booster.execute_pipeline(iter([BATCH]), model, model_loss, optimizer)
        return {name for name, held in model.named_parameters() if sharding_of(held) and "layers.1." in name}

    sharded = Loopback(2).run(run)[0]
    assert any("q_proj" in name for name in sharded)
    assert not any("fc1" in name for name in sharded)


@pytest.mark.parametrize("settings", [{}, {"pp_size": 2}], ids=["whole", "cut"])
def test_attention_weights_of_own_heads_under_a_given_plan_are_refused(settings):
    with pytest.raises(ConfigError, match=REFUSED):
        step(with_attentions, BATCH, squares, tensor_parallel_plan=VIT, **settings)


def test_attention_weights_are_right_where_a_plan_leaves_attention_whole():
    expected = squares(with_attentions()(**BATCH), BATCH).item()
    losses = step(with_attentions, BATCH, squares, tensor_parallel_plan={"*.fc1": "column", "*.fc2": "row"})
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
def test_attention_weights_beside_experts_are_right(settings):
    def make():
        return eager(mixtral(), output_attentions=True)

    expected = squares(make()(**TEXT), TEXT).item()
    assert step(make, TEXT, squares, **settings) == pytest.approx([expected] * 2, rel=1e-5)


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
