"""Small models with plans that divide their layers."""

import functools

import torch
from copies import copied
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    MPNetConfig,
    MPNetForMaskedLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

VIT = {
    "*.q_proj": "column",
    "*.k_proj": "column",
    "*.v_proj": "column",
    "*.o_proj": "row",
    "*.fc1": "column",
    "*.fc2": "row",
}
LLAMA = {
    "*.q_proj": "column",
    "*.k_proj": "column",
    "*.v_proj": "column",
    "*.o_proj": "row",
    "*.gate_proj": "column",
    "*.up_proj": "column",
    "*.down_proj": "row",
    "*.embed_tokens": "vocab",
}
GPT2 = {
    "*.c_attn": "fused_column:concatenated:3",
    "*.attn.c_proj": "row",
    "*.c_fc": "column",
    "*.mlp.c_proj": "row",
    "*.wte": "vocab",
}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 37}


def token_batch(num_samples=4, seed=0):
    ids = torch.randint(0, 37, (num_samples, 6), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


@copied
def llama(num_kv_heads=2, tied=True, num_layers=2):
    torch.manual_seed(0)
    sizes = SIZES | {"num_hidden_layers": num_layers, "num_key_value_heads": num_kv_heads}
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tied, use_cache=False)).train()


@copied
def qwen3():
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8, use_cache=False, tie_word_embeddings=False)
    model = Qwen3ForCausalLM(config).train()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, 1.0, 0.2)
    return model


@copied
def gpt2():
    torch.manual_seed(0)
    dropout = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=37, n_positions=8, use_cache=False, **dropout)
    model = GPT2LMHeadModel(config).train()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return model


@copied
def bloom():
    """Its blocks are given a bias for every head, and return attention probabilities."""
    torch.manual_seed(0)
    config = BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=37, use_cache=False)
    model = BloomForCausalLM(config).train()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    return model


@copied
def mixtral():
    """All experts of a block in one tensor each."""
    torch.manual_seed(0)
    config = MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4, use_cache=False)
    return MixtralForCausalLM(config).train()


MODELS = {
    "llama-tied": (llama, LLAMA),
    "llama": (functools.partial(llama, tied=False), LLAMA | {"lm_head": "gathered_column"}),
    "llama-one-kv-head": (functools.partial(llama, num_kv_heads=1), LLAMA),
    "qwen3": (qwen3, LLAMA | {"*.q_norm": "partial_grad", "*.k_norm": "partial_grad"}),
    "gpt2": (gpt2, GPT2),
    "bloom": (bloom, {"*.dense_h_to_4h": "column", "*.dense_4h_to_h": "row"}),
}


@copied
def t5():
    """A table of biases by head, in the first block of each kind; the others are given what it makes of it."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "vocab_size": 37}
    sizes |= {"num_layers": 2, "num_decoder_layers": 1}
    ids = {"decoder_start_token_id": 0, "pad_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**sizes, **ids, dropout_rate=0.0, use_cache=False)).train()


@copied
def falcon(num_layers=2):
    """All heads of queries share one of keys and values, in one fused layer."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": num_layers, "num_attention_heads": 4, "vocab_size": 37}
    return FalconForCausalLM(FalconConfig(**sizes, multi_query=True, bias=True, use_cache=False)).train()


@copied
def mpnet(dropout=0.0, num_layers=2):
    """A table of biases by head beside the blocks, which are all given what is made of it."""
    torch.manual_seed(0)
    dropouts = dict.fromkeys(["hidden_dropout_prob", "attention_probs_dropout_prob"], dropout)
    sizes = SIZES | {"num_hidden_layers": num_layers, "max_position_embeddings": 16}
    return MPNetForMaskedLM(MPNetConfig(**sizes, **dropouts)).train()


@copied
def deepseek():
    """Keys and values through a narrow layer that stays whole and whose output is used in two ways; experts."""
    torch.manual_seed(0)
    heads = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    sizes = SIZES | {"num_key_value_heads": 4, "moe_intermediate_size": 16}
    config = DeepseekV3Config(**sizes, **heads, **experts, first_k_dense_replace=0, use_cache=False)
    return DeepseekV3ForCausalLM(config).train()


@copied
def llama4():
    """A router that returns two tensors, and experts whose outputs are the last dimension of their tensors."""
    torch.manual_seed(0)
    sizes = SIZES | {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size_mlp": 48}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1}
    model = Llama4ForCausalLM(Llama4TextConfig(**sizes, **experts, pad_token_id=0, use_cache=False)).train()
    for name, parameter in model.named_parameters():
        if "experts" in name:  # empty or zero from the start
            nn.init.normal_(parameter, std=0.2)
    return model


@copied
def olmo2():
    """Queries and keys are normalised over the width of all heads; two heads of keys and values."""
    torch.manual_seed(0)
    sizes = SIZES | {"num_key_value_heads": 2, "pad_token_id": 0}
    model = Olmo2ForCausalLM(Olmo2Config(**sizes, use_cache=False)).train()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, 1.0, 0.2)
    return model


@copied
def gpt_oss():
    """Experts with biases, and a sink for each head."""
    torch.manual_seed(0)
    sizes = SIZES | {"num_key_value_heads": 2, "head_dim": 8, "use_cache": False}
    model = GptOssForCausalLM(GptOssConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)).train()
    for name, parameter in model.named_parameters():
        if "bias" in name or "sinks" in name:
            nn.init.normal_(parameter, std=0.1)
    return model
