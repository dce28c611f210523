r"""Folders that save_model writes with transformers 5 compute the same with an older version.

    python -m venv --system-site-packages older && older/bin/pip install transformers==4.51.3
    OMP_NUM_THREADS=1 PYTHONPATH=.:plugins python benchmarks/older_transformers.py --python older/bin/python

Small models with random weights are boosted and saved, with configurations that are not the defaults of their classes.
The other Python reads each folder by from_pretrained, and its outputs are compared with those before the save. The exit
status is 1 if one differs by more than 1e-6, or is not read.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

TOLERANCE = 1e-6
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
KV = {**SIZES, "num_key_value_heads": 2}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
    "rope_type": "llama3",
}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
VIT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def theta(value: float, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": value, **more}}


def layers(full: float, sliding: float) -> dict[str, Any]:
    of_layers = {"full_attention": full, "sliding_attention": sliding}
    return {"rope_parameters": {name: theta(value)["rope_parameters"] for name, value in of_layers.items()}}


# Class of the model, class of its configuration, and what is not the default of that.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**KV, **theta(50.0)}),
    "llama3": ("LlamaForCausalLM", "LlamaConfig", {**KV, **theta(50.0, **LLAMA3), "max_position_embeddings": 64}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**KV, **theta(50.0)}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**KV, "head_dim": 8, "tie_word_embeddings": True, **theta(50.0)}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**KV, "head_dim": 8, "num_experts": 4, **EXPERTS, **theta(50.0)},
    ),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**KV, "num_local_experts": 4, **theta(50.0)}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {**SIZES, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
        | {"first_k_dense_replace": 1, **LATENT, **EXPERTS, **theta(50.0)},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**KV, "num_hidden_layers": 6, "head_dim": 8, "sliding_window": 4, "sliding_window_pattern": 3}
        | layers(50.0, 20.0),
    ),
    "cohere2": (
        "Cohere2ForCausalLM",
        "Cohere2Config",
        {
            **KV,
            "num_hidden_layers": 4,
            "sliding_window": 4,
            "sliding_window_pattern": 2,
            "pad_token_id": 0,
            **theta(50.0),
        },
    ),
    "phi": ("PhiForCausalLM", "PhiConfig", {**SIZES, **theta(50.0, partial_rotary_factor=0.25)}),
    "stablelm": (
        "StableLmForCausalLM",
        "StableLmConfig",
        {**SIZES, "num_key_value_heads": 4, **theta(50.0, partial_rotary_factor=0.5)},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**SIZES, **theta(50.0, partial_rotary_factor=0.5)}),
    "modernbert": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {**SIZES, **layers(50.0, 20.0), "pad_token_id": 0, "attn_implementation": "eager"},
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}),
    "falcon": ("FalconForCausalLM", "FalconConfig", {**SIZES, **theta(50.0)}),
    "mamba": ("MambaForCausalLM", "MambaConfig", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}),
    "bert": ("BertForMaskedLM", "BertConfig", SIZES),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64},
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", {**VIT, "image_size": 8, "patch_size": 4, "num_labels": 5}),
}


def inputs_of(name: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator)}
    ids = torch.randint(3, 64, (2, 12), generator=generator)
    return {"input_ids": ids, "decoder_input_ids": ids} if name == "t5" else {"input_ids": ids}


@torch.no_grad()
def logits(model: Any, name: str) -> torch.Tensor:
    return model.eval()(**inputs_of(name)).logits  # type: ignore[no-any-return]


def write(folder: Path) -> None:
    """Save every model, with its outputs."""
    from hybridpp import Booster, HybridParallelPlugin  # noqa: PLC0415  # the other Python has none

    transformers.logging.disable_progress_bar()
    for name, (model_class, config_class, settings) in MODELS.items():
        torch.manual_seed(0)
        model = getattr(transformers, model_class)(getattr(transformers, config_class)(**settings))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        outputs = logits(model, name)
        booster = Booster(plugin=HybridParallelPlugin(precision="fp32"))
        booster.save_model(booster.boost(model).model, folder / name)
        torch.save(outputs, folder / name / "outputs.pt")


def read(folder: Path) -> Iterator[bool]:
    """Compare what every folder computes here; whether it is the same."""
    print(f"transformers {transformers.__version__}")
    for name, (model_class, _, _) in MODELS.items():
        try:
            model = getattr(transformers, model_class).from_pretrained(folder / name, torch_dtype="auto")
            expected = torch.load(folder / name / "outputs.pt", weights_only=True)
            difference = float((logits(model, name) - expected).abs().max() / expected.abs().max())
        except Exception as error:  # whatever an older version makes of it
            print(f"{name:12} {type(error).__name__}: {str(error).splitlines()[0]}")
            yield False
            continue
        print(f"{name:12} {difference:.1e}")
        yield difference <= TOLERANCE


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", required=True, help="of an environment with the older version")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if args.read:
        sys.exit(not all([*read(args.read)]))
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [args.python, __file__, "--python", args.python, "--read", folder]
        sys.exit(subprocess.run(command, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
