"""Models on the meta device are divided as the same models with weights are."""

import pytest
import torch
from divided_models import SIZES, bloom, gpt2, mixtral, token_batch
from hybridpp_plugins.find_tp_plan import find_tp_plan
from hybridpp_plugins.sample import find_samples
from processes import run_ranks
from support import assert_near, boosted, first_microbatch, image_batch, model_loss, sgd, small_vit, whole_over_tp
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from hybridpp.checkpoint import derive_buffers
from hybridpp.cluster import Loopback, current_world


def llama():
    """With a key-value cache, as it comes."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2))


def bert():
    return BertForSequenceClassification(BertConfig(**SIZES))


def opt():
    sizes = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 37}
    return OPTForCausalLM(OPTConfig(**sizes, word_embed_proj_dim=32))


class Normed(nn.Module):
    """Blocks with running statistics, which are part of the state."""

    def __init__(self):
        super().__init__()
        parts = (nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        self.blocks = nn.ModuleList([nn.Sequential(*parts) for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def empty(make_model):
    with torch.device("meta"):
        return make_model()


def plan_of(model, sample=None, size=2):
    cpu = torch.device("cpu")
    return find_tp_plan(model, lambda: find_samples(model, None, sample, cpu), size, current_world().control())


@pytest.mark.parametrize(
    ("make_model", "size"),
    [(small_vit, 2), (llama, 4), (gpt2, 2), (bert, 2), (opt, 2), (bloom, 4), (mixtral, 2), (mixtral, 4)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_plan_is_that_of_the_model_with_weights(make_model, size):
    model = empty(make_model)
    derive_buffers(model)
    plan = plan_of(model, size=size)
    full = plan_of(make_model(), size=size)
    # A trace runs one of several equal blocks.
    assert plan.ways.items() <= full.ways.items()
    assert plan == full._replace(ways=plan.ways)
    assert plan.styles or size > 2
    assert all(parameter.is_meta for parameter in model.parameters())


def test_buffers_without_numbers_will_do():
    sample = torch.ones(2, 8)
    assert plan_of(empty(Normed), sample) == plan_of(Normed(), sample)


@pytest.mark.parametrize(("make_model", "pp_size"), [(small_vit, 1), (llama, 2), (gpt2, 1)])
def test_it_trains_from_a_folder_as_the_model_with_weights(tmp_path, make_model, pp_size):
    batch = image_batch(4) if make_model is small_vit else token_batch()
    sample = first_microbatch(batch, {"num_microbatches": 2})
    make_model().save_pretrained(tmp_path)

    def run(on_meta):
        model = (empty(make_model) if on_meta else make_model()).train()
        booster, model, optimizer = boosted(model, sgd, sample, tp_size=2, pp_size=pp_size, num_microbatches=2)
        if on_meta:
            booster.load_model(model, tmp_path)
        loss = booster.execute_pipeline(iter([batch]), model, model_loss, optimizer)["loss"].item()
        optimizer.step()
        return loss, whole_over_tp(booster, model, {key: p.detach() for key, p in model.named_parameters()})

    ranks = Loopback(2 * pp_size).run(lambda: run(True)), Loopback(2 * pp_size).run(lambda: run(False))
    for (loss, weights), (expected_loss, expected) in zip(*ranks, strict=True):
        assert loss == expected_loss
        assert_near(weights, expected, 0)


def large():
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "num_key_value_heads": 8}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32000, num_hidden_layers=32, **sizes))


def peak_mib():
    def status(key):
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))

    plan_of(empty(llama))  # whatever is imported for it
    model = empty(large)
    before = status("VmRSS")
    # Of every block its layers; embedding and head.
    assert len(plan_of(model).styles) == 32 * 7 + 2
    return status("VmHWM") - before


def test_memory_is_taken_for_a_block_and_not_for_the_model():
    sizes = {name: p.numel() * 4 / 2**20 for name, p in empty(large).named_parameters()}
    block = sum(size for name, size in sizes.items() if name.startswith("model.layers.0."))
    (peak,) = run_ranks(peak_mib, 1)
    # Weights in double precision, of which ranks have views; gradients of a layer or two; what the heap keeps.
    assert peak < 7 * block < sum(sizes.values()) / 5
