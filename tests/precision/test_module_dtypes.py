"""Modules that compute in fp32 in a half-precision model, by patterns."""

import copy
import functools
import re

import pytest
import torch
from divided_models import LLAMA, llama, token_batch
from support import assert_near, assert_same, boosted, image_batch, model_loss, sgd, tiny_vit, train, trained_alone

from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError

BATCHES = [token_batch(seed=seed) for seed in range(2)]
NORMS = {"precision": "bf16", "num_microbatches": 2, "fp32_modules": ["*norm*"]}
untied = functools.partial(llama, tied=False, num_layers=4)


def run_one(make_model, sample, **settings):
    """What a module of one boosted model is given, holds and returns, by name, of one step."""

    def run():
        booster, model, optimizer = boosted(make_model(), sgd, sample, **{"precision": "bf16", **settings})
        seen = {}

        def note(name, module, args, output):
            tensors = [value for value in (*args, output) if isinstance(value, torch.Tensor)]
            held = [p.dtype for p in module.parameters(recurse=False)]
            seen[name] = (held, [tensor.dtype for tensor in tensors])

        for name, module in model.named_modules():
            module.register_forward_hook(functools.partial(note, name))
        booster.execute_pipeline(iter([sample]), model, model_loss, optimizer)
        optimizer.step()
        return seen, booster.plugin.describe_precision(model)

    ((seen, table),) = Loopback(1).run(run)
    return seen, table


def test_weights_are_fp32_and_what_comes_and_goes_is_half():
    seen, table = run_one(llama, token_batch(), fp32_modules=["*norm*"])
    half, full = torch.bfloat16, torch.float32
    assert seen["model.layers.0.input_layernorm"] == ([full], [half, half])
    assert seen["model.norm"] == ([full], [half, half])
    assert seen["model.layers.0.self_attn.q_proj"] == ([half], [half, half])
    assert re.search(r"5 LlamaRMSNorm +\| float32 +\| float32\n", table)
    assert re.search(r"15 Linear +\| bfloat16 +\| bfloat16\n", table)


def test_a_norm_in_fp32_gives_what_torch_gives():
    def make_model():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.RMSNorm(8), torch.nn.Linear(8, 2))

    batch = (torch.randn(6, 4, generator=torch.Generator().manual_seed(0)),)

    def squares(outputs, _):
        return outputs.square().mean()

    first, norm, last = model = make_model()
    first.bfloat16(), last.bfloat16()
    hidden = norm(first(batch[0].bfloat16()).float()).bfloat16()
    squares(last(hidden).float(), None).backward()
    settings = {"precision": "bf16", "criterion": squares, "fp32_modules": ["RMSNorm"]}
    gradients = train(make_model, [batch], **settings)["gradients"]
    assert_same(gradients, {name: p.grad.float() for name, p in model.named_parameters()})


@pytest.mark.parametrize(
    "layout",
    [
        {"pp_size": 2},
        {"pp_size": 2, "schedule": "zb-v"},
        {"pp_size": 2, "gradient_checkpoint_config": {"gradient_checkpointing_ratio": 1.0}},
    ],
    ids=str,
)
def test_stages_give_the_bits_of_one_process(layout):
    whole = trained_alone(untied, BATCHES, **NORMS)
    cut = train(untied, BATCHES, **NORMS, **layout)
    assert_same(cut["weights"], whole["weights"])
    assert_same(cut["gradients"], whole["gradients"])


def test_shared_layers_and_replicas_agree_with_one_process():
    whole = train(llama, BATCHES, **NORMS)
    parts = train(llama, BATCHES, **NORMS, tp_size=2, pp_size=2, tensor_parallel_plan=LLAMA)
    assert_near(parts["gradients"], whole["gradients"], 2e-2)
    replicas = train(llama, BATCHES, **(NORMS | {"num_microbatches": 1}), dp_size=2)
    assert_near(replicas["gradients"], whole["gradients"], 1e-2)


def test_whole_blocks_and_layers_may_be_in_fp32_and_parts_of_them_not():
    patterns = ["vit.layers.1", "!vit.layers.1.mlp.fc1", "classifier"]
    seen, _ = run_one(tiny_vit, image_batch(2), fp32_modules=patterns)
    half, full = torch.bfloat16, torch.float32
    assert seen["vit.layers.1.attention.q_proj"] == ([full, full], [full, full])
    assert seen["vit.layers.1.mlp.fc1"] == ([half, half], [full, full])
    assert seen["vit.layers.1.mlp.fc2"] == ([full, full], [full, full])
    assert seen["vit.layers.2.mlp.fc2"] == ([half, half], [half, half])
    assert seen["classifier"] == ([full, full], [half, half])


def test_against_the_rule_batch_normalisation_is_put_in_half_precision():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))

    def run(**settings):
        _, boosted_model, _ = boosted(copy.deepcopy(model), sgd, (torch.randn(4, 4),), precision="bf16", **settings)
        return boosted_model[1].weight.dtype, boosted_model[1].running_mean.dtype

    assert Loopback(1).run(run) == [(torch.float32,) * 2]
    assert Loopback(1).run(lambda: run(fp32_modules=["!BatchNorm1d"])) == [(torch.bfloat16,) * 2]


def test_folders_hold_and_give_back_every_bit(tmp_path):
    def run():
        booster, model, optimizer = boosted(llama(), sgd, token_batch(), pp_size=2, **NORMS)
        booster.execute_pipeline(iter([token_batch()]), model, model_loss, optimizer)
        optimizer.step()
        booster.save_model(model, tmp_path)
        fresh_booster, fresh, _ = boosted(llama(), sgd, token_batch(), pp_size=2, **NORMS)
        fresh_booster.load_model(fresh, tmp_path)
        assert_same(fresh.state_dict(), model.state_dict())
        return {name: tensor.dtype for name, tensor in model.state_dict().items()}

    first, last = Loopback(2).run(run)
    assert first["model.layers.0.input_layernorm.weight"] == last["model.norm.weight"] == torch.float32
    assert first["model.layers.0.mlp.up_proj.weight"] == torch.bfloat16


def test_in_fp32_there_is_nothing_to_keep():
    plain = train(tiny_vit, [image_batch(4)])
    assert_same(train(tiny_vit, [image_batch(4)], fp32_modules=["*norm*", "!*fc1"])["weights"], plain["weights"])


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            ["*.input_layernrm"],
            "fp32_modules must match module names or class names: nothing in LlamaForCausalLM matches "
            "'*.input_layernrm'. Similar names: input_layernorm",
        ),
        (["lm_head"], "fp32_modules selects only one of 'model.embed_tokens' and 'lm_head', which share weights."),
        (
            "*norm*",
            "fp32_modules must be a list of patterns of module names or classes, like ['*.router']: got '*norm*'.",
        ),
        (["!"], "fp32_modules must be a list of patterns of module names or classes, like ['*.router']: got ['!']."),
    ],
)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_what_cannot_be_is_refused(patterns, message, precision):
    if precision == "fp32" and patterns == ["lm_head"]:
        return

    def run():
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
            boosted(llama(), sgd, token_batch(), precision=precision, fp32_modules=patterns)

    Loopback(1).run(run)
