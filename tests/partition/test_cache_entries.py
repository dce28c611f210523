"""Blocks that have one entry of a key-value cache stay on one stage, or are refused: each stage has a cache."""

import copy
import re

import pytest
import torch
from partition.tracing import tracer
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig, LlamaConfig, LlamaForCausalLM

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback
from hybridpp.errors import PartitionError

IDS = torch.arange(32).reshape(4, 8) * 7 % 50
BATCH = {"input_ids": IDS, "labels": IDS}
SIZES = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2}


def llama(change=lambda layers: None, use_cache=True):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=32, vocab_size=50, use_cache=use_cache))
    change(model.model.layers)
    return model


def one_attention(layers):
    for layer in layers:
        layer.self_attn = layers[0].self_attn


def one_layer_twice(layers):
    layers[2] = layers[1]


def a_copy(layers):
    layers[2] = copy.deepcopy(layers[1])


def gemma():
    """Its last two layers read the keys of others, which the model passes to them beside the cache."""
    torch.manual_seed(0)
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2, "laurel_rank": 2}
    sparsity = {"activation_sparsity_pattern": [0.0] * 4, "altup_num_inputs": 2}
    widths = {"hidden_size_per_layer_input": 4, "intermediate_size": 32, "head_dim": 8}
    words = {"vocab_size": 50, "vocab_size_per_layer_input": 50}
    return Gemma3nForCausalLM(Gemma3nTextConfig(**SIZES, **layers, **sparsity, **widths, **words))


def losses(make, pp_size, num_steps=2, **settings):
    """Of some steps."""

    def rank():
        model = make()
        booster = Booster(plugin=HybridParallelPlugin(pp_size=pp_size, num_microbatches=1, **settings), device="cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        parts = booster.boost(model, optimizer, lambda outputs, inputs: outputs.loss, sample=BATCH)
        found = []
        for _ in range(num_steps):
            result = booster.execute_pipeline(iter([BATCH]), parts.model, parts.criterion, parts.optimizer)
            parts.optimizer.step()
            found.append(result["loss"].item())
        return found

    return Loopback(pp_size).run(rank)[0]


@pytest.mark.parametrize(
    ("change", "second"), [(one_attention, "layers.2"), (one_layer_twice, "layers.1"), (a_copy, "layers.2")]
)
def test_layers_with_one_entry_are_refused_on_two_stages(change, second):
    text = f"unit 'model.{second}' on stage 1 reads keys that unit 'model.layers.1' on stage 0 has put in the key-value"
    with pytest.raises(PartitionError, match=re.escape(text)):
        losses(lambda: llama(change), 2)


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (lambda: llama(a_copy), {"split_points": {"model.layers.0": "after"}}),
        (lambda: llama(one_attention, use_cache=False), {}),
        (gemma, {"num_steps": 1}),  # its gradients are NaN in plain PyTorch, too
    ],
)
def test_what_needs_no_entry_of_another_stage_trains_as_in_one_process(make, settings):
    assert losses(make, 2, **settings) == pytest.approx(losses(make, 1, settings.get("num_steps", 2)), abs=2e-6)


@pytest.mark.parametrize(("change", "is_run"), [(lambda layers: None, [0]), (a_copy, [0, 0, 1, 2, 3])])
def test_a_trace_runs_all_equal_layers_only_where_they_may_have_one_entry(change, is_run):
    model = llama(change)
    ran = []
    for number, layer in enumerate(model.model.layers):
        forward = layer.mlp.forward
        layer.mlp.forward = lambda x, forward=forward, number=number: ran.append(number) or forward(x)
    found = tracer(model).trace((), BATCH)
    assert sum(".layers." in call.name for call in found.calls) == 4
    assert ran == is_run  # the first one again, where it is found that two have one entry
