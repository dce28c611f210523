"""A tiny language model with each of peft's methods, as the library fills them in for that kind of model."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from models.batches import Batch
from models.others.recipe import SAMPLES, Foreign, takes
from torch import nn

LIBRARY = "peft"
VOCAB, LENGTH, WIDTH = 64, 12, 32
# What methods are nothing without, or have too large a default of; of these, each is told what it takes.
_NEEDED: dict[str, Any] = {
    "target_modules": ["q_proj", "v_proj", "down_proj"],
    "feedforward_modules": ["down_proj"],
    "task_type": "CAUSAL_LM",
    "r": 4,
    "n_frequency": 16,
    "block_size": 8,
    "boft_block_size": 4,
    "group_size": 8,
    "num_vectors": 8,
    "vector_length": 8,
    "num_virtual_tokens": 4,
    "adapter_len": 4,
    "adapter_layers": 2,
    "total_step": 10,
}


def models() -> Iterator[Foreign]:
    """Every method of the library, and LoRA's own variants."""
    import peft

    for method, kind in peft.PEFT_TYPE_TO_CONFIG_MAPPING.items():
        settings = {"r": 0} if "oft_block_size" in takes(kind) else {}  # it follows from the other
        yield Foreign(f"{LIBRARY}.{method.value}", partial(_attempts, kind, settings), _batches)
    for name, settings in {
        "LORA.dora": {"use_dora": True},
        "LORA.rslora": {"use_rslora": True},
        "LORA.all_linear": {"target_modules": "all-linear"},
        "LORA.embedding": {"target_modules": ["embed_tokens", "q_proj"]},
        "LORA.bias": {"bias": "all"},
        "LORA.modules_to_save": {"modules_to_save": ["lm_head"]},
    }.items():
        yield Foreign(f"{LIBRARY}.{name}", partial(_attempts, peft.LoraConfig, settings), _batches)


def _attempts(kind: Any, settings: dict[str, Any]) -> Iterator[Any]:
    yield partial(_make, kind, {name: value for name, value in _NEEDED.items() if name in takes(kind)} | settings)


def _make(kind: Any, settings: dict[str, Any]) -> nn.Module:
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    made: nn.Module = peft.get_peft_model(LlamaForCausalLM(config), kind(**settings))
    return made


def _batches(model: nn.Module) -> Iterator[Batch]:
    ids = torch.randint(VOCAB, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
    yield {"input_ids": ids, "labels": ids}
