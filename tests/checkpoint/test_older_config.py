"""Configurations have the names of transformers 4.51, too, and transformers 5 reads them as before.

Whether 4.51 computes the same with them is what `benchmarks/older_transformers.py` shows, which needs that version.
"""

import json

import pytest
from transformers import (
    Cohere2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    LlavaConfig,
    ModernBertConfig,
    PhiConfig,
    Qwen3MoeConfig,
    ViTConfig,
)

from hybridpp.checkpoint.older_config import add_older_names, with_older_names

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
    "rope_type": "llama3",
}
LAYERS = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
}


def theta(value, **more):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": value, **more}}


CASES = {
    "llama": (LlamaConfig, theta(5e5), {"rope_theta": 5e5}),
    "llama3": (LlamaConfig, theta(5e5, **LLAMA3), {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
    "phi": (PhiConfig, theta(3e4, partial_rotary_factor=0.25), {"rope_theta": 3e4, "partial_rotary_factor": 0.25}),
    "gpt_neox": (
        GPTNeoXConfig,
        theta(3e4, partial_rotary_factor=0.5),
        {"rotary_emb_base": 3e4, "rotary_pct": 0.5},
    ),
    "qwen3_moe": (Qwen3MoeConfig, {"num_experts": 4, **theta(3e4)}, {"num_experts": 4, "rope_theta": 3e4}),
    "gemma3": (
        Gemma3TextConfig,
        {"rope_parameters": LAYERS, "num_hidden_layers": 4, "sliding_window_pattern": 2},
        {
            "rope_theta": 3e5,
            "rope_local_base_freq": 2e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 2,
        },
    ),
    "modernbert": (
        ModernBertConfig,
        {"rope_parameters": {name: {"rope_type": "default", "rope_theta": 1e3} for name in LAYERS}},
        {"global_rope_theta": 1e3, "local_rope_theta": 1e3},
    ),
    "no period": (
        Cohere2Config,
        {"layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2, **theta(3e4)},
        {"rope_theta": 3e4},
    ),
    "a dtype": (ViTConfig, {"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}),
}


def as_json(config):
    return json.loads(config.to_json_string(use_diff=False))


@pytest.mark.parametrize("name", CASES)
def test_older_names_are_added_and_nothing_else_changes(name):
    kind, settings, expected = CASES[name]
    config = as_json(kind(**settings))
    both = with_older_names(config)
    assert {key: value for key, value in both.items() if key not in config} == {
        key: value for key, value in expected.items() if key not in config
    }
    assert {key: both[key] for key in expected} == expected
    assert {key: both[key] for key in config} == config
    again = as_json(kind.from_dict(both))
    assert {key: again[key] for key in config} == config
    assert {key: value for key, value in again.items() if key not in config}.items() <= expected.items()


@pytest.mark.parametrize("kind", [LlavaConfig, Gemma3Config])
def test_parts_of_a_configuration_have_them_too(kind):
    config = as_json(kind())
    both = with_older_names(config)
    assert "rope_theta" in both["text_config"]
    assert "rope_theta" not in config["text_config"]
    assert as_json(kind.from_dict(both))["text_config"]["rope_parameters"] == config["text_config"]["rope_parameters"]


def test_the_file_of_a_configuration_is_written_again(tmp_path):
    LlamaConfig(**theta(5e5)).save_pretrained(tmp_path)
    before = json.loads((tmp_path / "config.json").read_text())
    add_older_names(tmp_path / "config.json")
    assert json.loads((tmp_path / "config.json").read_text()) == {**before, "rope_theta": 5e5}
    assert LlamaConfig.from_pretrained(tmp_path).rope_parameters == before["rope_parameters"]
