"""Generated text: the tokens of the complete model in one process, in every layout."""

import pytest
import torch
from support import boosted, sgd, tiny_vit
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from hybridpp import Booster
from hybridpp.cluster import Loopback, current_world
from hybridpp.errors import ConfigError, DataError, PartitionError
from hybridpp.partition import Tracer


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": 32, "bos_token_id": 2, "eos_token_id": 5, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**sizes, **tokens, num_key_value_heads=2, initializer_range=0.5))


def mistral():
    """Layers that see the last three tokens only."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    tokens = {"vocab_size": 32, "bos_token_id": 2, "eos_token_id": 5, "pad_token_id": 0}
    return MistralForCausalLM(
        MistralConfig(**sizes, **tokens, num_key_value_heads=2, initializer_range=0.5, sliding_window=3)
    )


def gpt2():
    """Absolute positions, which skip padding."""
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "initializer_range": 0.3}
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, bos_token_id=2, eos_token_id=5, pad_token_id=0, **sizes))


def t5():
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=32, **sizes, decoder_start_token_id=0, pad_token_id=0))


def prompts(num_tokens=4, seed=0):
    ids = torch.randint(6, 32, (2, num_tokens), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, :1] = 0
    return {"input_ids": ids, "attention_mask": mask}


def sample(make):
    batch = {name: value[:1] for name, value in prompts().items()}
    return batch if make is not t5 else {**batch, "decoder_input_ids": torch.zeros(1, 1, dtype=torch.long)}


GREEDY, SAMPLED, BEAMS = {}, {"do_sample": True, "top_k": 8}, {"num_beams": 2}


@pytest.mark.covering
@pytest.mark.parametrize(
    ("make", "layout", "settings"),
    [
        (llama, {"pp_size": 2, "tp_size": 2}, GREEDY),
        (llama, {"pp_size": 2, "schedule": "zb-h1"}, SAMPLED),
        (llama, {"pp_size": 2}, BEAMS),
        (llama, {"pp_size": 2}, {"use_cache": False}),
        (mistral, {"pp_size": 2}, {"max_new_tokens": 7}),
        (gpt2, {"pp_size": 2}, GREEDY),
        (gpt2, {}, {"use_cache": False}),
        (t5, {"pp_size": 2}, BEAMS),
        pytest.param(t5, {"pp_size": 2}, SAMPLED, marks=pytest.mark.matrix),
    ],
)
def test_tokens_are_those_of_one_process(make, layout, settings):
    model = make().eval()
    torch.manual_seed(7)
    settings = {"max_new_tokens": 5, **settings}
    expected = model.generate(**prompts(), **settings)

    def run():
        booster, boosted_model, _ = boosted(make(), None, sample(make), **layout)
        torch.manual_seed(7)
        found = booster.generate(boosted_model.train(), prompts(), **settings)
        assert boosted_model.training
        return found

    for found in Loopback(layout.get("pp_size", 1) * layout.get("tp_size", 1)).run(run):
        assert torch.equal(found, expected)


def test_replicas_generate_as_many_tokens_as_each_needs():
    lengths = [2, 6]
    given = [prompts(3 + replica, seed=replica) for replica in range(2)]
    expected = [llama().eval().generate(**given[n], max_new_tokens=lengths[n]) for n in range(2)]

    def run():
        booster, model, _ = boosted(llama(), sgd, sample(llama), zero_stage=3)
        replica = current_world().rank
        return booster.generate(model, given[replica], max_new_tokens=lengths[replica])

    for found, one in zip(Loopback(2).run(run), expected, strict=True):
        assert torch.equal(found, one)


def test_layers_with_one_entry_of_the_cache_are_refused_on_two_stages():
    def run():
        model = llama()
        model.config.use_cache = False  # in training
        model.model.layers[1].self_attn.layer_idx = 0
        booster, model, _ = boosted(model, None, sample(llama), pp_size=2)
        unpadded = {"input_ids": prompts()["input_ids"]}
        booster.generate(model, unpadded, max_new_tokens=3, use_cache=False)
        booster.generate(model, unpadded, max_new_tokens=3)

    text = r"unit 'model.layers.1' on stage 1 reads keys that unit 'model.layers.0' on stage 0 has put in the key-value"
    with pytest.raises(PartitionError, match=text):
        Loopback(2).run(run)


@pytest.mark.parametrize("use_cache", [None, False])
def test_with_a_cache_a_call_has_new_tokens_only_and_is_traced_twice(use_cache, monkeypatch):
    traced = []
    monkeypatch.setattr(Tracer, "trace", _counted(Tracer.trace, traced))

    def run():
        model, widths = llama(), []
        model.model.embed_tokens.register_forward_hook(lambda module, args, output: widths.append(args[0].shape[1]))
        booster, model, _ = boosted(model, None, sample(llama), pp_size=2)
        widths.clear()
        traced.clear()
        booster.generate(model, prompts(4), max_new_tokens=7, eos_token_id=[31], use_cache=use_cache)
        return widths

    first, _ = Loopback(2).run(run)
    assert [width for width in first if width] == ([4, 5, 6, 7, 8, 9, 10] if use_cache is False else [4] + [1] * 6)
    # By each of two ranks: the prompt, and two of the further tokens.
    assert len(traced) == (14 if use_cache is False else 6)


def _counted(trace, calls):
    def count(self, *args, **kwargs):
        calls.append(None)
        return trace(self, *args, **kwargs)

    return count


def test_tokens_alone_or_nothing_may_be_given():
    model = llama().eval()
    booster, boosted_model, _ = boosted(llama(), None, sample(llama))
    ids = prompts()["input_ids"]
    assert torch.equal(booster.generate(boosted_model, ids, max_new_tokens=2), model.generate(ids, max_new_tokens=2))
    assert torch.equal(booster.generate(boosted_model, max_new_tokens=2), model.generate(max_new_tokens=2))


def test_ranks_that_sample_different_tokens_are_refused():
    def run():
        booster, model, _ = boosted(llama(), None, sample(llama), pp_size=2)
        torch.manual_seed(current_world().rank)
        with pytest.raises(DataError, match="the ranks of one pipeline must hold the same batch"):
            booster.generate(model, prompts(), max_new_tokens=9, do_sample=True)

    Loopback(2).run(run)


def test_what_cannot_be_generated_is_refused():
    booster, model, _ = boosted(tiny_vit(), None, None)
    with pytest.raises(ConfigError, match="a model of transformers that generates text: got ViTForImageClassification"):
        booster.generate(model, torch.ones(1, 1))
    booster = Booster(device="cpu")
    model, *_ = booster.boost(llama())
    with pytest.raises(ConfigError, match="keeps its own cache of keys and values, of each stage's layers"):
        booster.generate(model, prompts(), cache_implementation="static")
    with_encoder = booster.boost(t5()).model
    with pytest.raises(
        ConfigError,
        match="no cache of keys and values of this T5ForConditionalGeneration, because the model has an encoder: got",
    ):
        booster.generate(with_encoder, prompts(), use_cache=True)
    with pytest.raises(ConfigError, match="generate got input_ids twice"):
        booster.generate(model, prompts(), input_ids=prompts()["input_ids"])
