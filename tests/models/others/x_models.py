"""x-transformers: its wrappers, and a small decoder with each of the options that its layers know switched on."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from models.batches import Batch
from models.others.recipe import SAMPLES, Foreign, first_input, takes
from torch import nn

LIBRARY = "x_transformers"
TOKENS, LENGTH, WIDTH, DEPTH, HEADS, HEAD_WIDTH = 64, 16, 32, 4, 4, 8
# What some options are nothing without.
_WITH: dict[str, dict[str, Any]] = {
    "attn_flash_pack_seq": {"rotary_pos_emb": True},
    "attn_qk_norm_dim_scale": {"attn_qk_norm": True},
    "attn_sparse_topk_straight_through": {"attn_sparse_topk": 4},
    "attn_data_dependent_alibi_per_row": {"attn_data_dependent_alibi": True},
    "attn_cope_talking_heads": {"attn_use_cope": True},
    "attn_cope_soft_onehot_pos": {"attn_use_cope": True},
    "attn_use_latent_q": {"attn_dim_latent_q": 16},
    "attn_use_latent_kv": {"attn_dim_latent_kv": 16},
    "attn_gate_values_headwise": {"attn_gate_values": True},
    "attn_output_gate_headwise": {"attn_output_gate": True},
    "attn_orthog_projected_values_per_head": {"attn_orthog_projected_values": True},
    "ff_glu_mult_bias": {"ff_glu": True},
    "ff_glu_softclamp": {"ff_glu": True},
    "ff_relu_squared": {"ff_glu": False},
    "learned_reinject_input_gate": {"reinject_input": True},
    "use_adaptive_layernorm": {"dim_condition": WIDTH},
    "use_adaptive_rmsnorm": {"dim_condition": WIDTH},
    "use_adaptive_layerscale": {"dim_condition": WIDTH, "use_adaptive_rmsnorm": True},
    "adaptive_condition_mlp": {"dim_condition": WIDTH, "use_adaptive_rmsnorm": True},
    "polar_bias_uniform_init": {"polar_pos_emb": True},
    "dynamic_pos_bias_log_distance": {"dynamic_pos_bias": True},
    "dynamic_pos_bias_norm": {"dynamic_pos_bias": True},
    "learned_value_residual_mix": {"add_value_residual": True},
    "attn_aggregated_residuals": {"attn_aggregated_residual_kwargs": {"lora_rank": 8}},
    "gated_multi_residual": {"residual_fn_kwargs": {"read_gate_rank": 8}, "num_residual_streams": 2},
    "qkv_receive_diff_residuals": {"num_residual_streams": 2},
}
# Options that are no switches.
_VALUES: dict[str, Any] = {
    "attn_num_mem_kv": 2,
    "attn_kv_heads": 2,
    "attn_sparse_topk": 4,
    "attn_max_attend_past": 4,
    "attn_value_dim_head": 4,
    "attn_qk_norm_groups": 2,
    "ff_mult": 2,
    "num_residual_streams": 2,
    "par_ratio": 2,
    "rotate_num_heads": 2,
    "sandwich_coef": 2,
    "shift_tokens": 1,
    "layers_execute_order": (0, 1, 2, 3, 2, 3, 4, 5, 6, 7),
}


def models() -> Iterator[Foreign]:
    """Wrappers, then options."""
    import x_transformers as library

    for name, make in _wrappers(library).items():
        yield _foreign(name, make)
    layers, attention, forward = library.Decoder, library.Attention, library.FeedForward
    switches = [name for name in _switches(library.x_transformers.AttentionLayers) if name != "causal"]
    # These the layers set themselves, from an option of their own.
    taken = {"causal", "learned_value_residual_mix", "qkv_receive_diff_residuals"}
    switches += [f"attn_{name}" for name in _switches(attention) if name not in taken]
    switches += [f"ff_{name}" for name in _switches(forward)]
    options = {name: {**_WITH.get(name, {}), name: True} for name in switches}
    options |= {name: {name: value} for name, value in _VALUES.items()}
    for name, settings in options.items():
        yield _foreign(name, partial(_decoder, library, layers, settings))


def _foreign(name: str, make: Callable[[], nn.Module]) -> Foreign:
    return Foreign(f"{LIBRARY}.{name}", lambda: [make], _batches)


def _switches(kind: Any) -> list[str]:
    return [name for name, parameter in takes(kind).items() if parameter.default is False]


def _decoder(library: Any, kind: Any, settings: dict[str, Any]) -> nn.Module:
    return _language(library, _stack(kind, settings))


def _stack(kind: Any, settings: dict[str, Any]) -> nn.Module:
    heads = {"attn_dim_head": HEAD_WIDTH} if "only_cross" not in settings else {}
    made: nn.Module = kind(
        dim=WIDTH, depth=DEPTH, heads=HEADS, rotary_emb_dim=HEAD_WIDTH, verbose=False, **heads | settings
    )
    return made


def _language(library: Any, layers: nn.Module, **settings: Any) -> nn.Module:
    made: nn.Module = library.TransformerWrapper(num_tokens=TOKENS, max_seq_len=LENGTH, attn_layers=layers, **settings)
    return made


def _wrappers(library: Any) -> dict[str, Callable[[], nn.Module]]:
    decoder = partial(_stack, library.Decoder, {})
    encoder = partial(_stack, library.Encoder, {})
    continuous = partial(library.ContinuousTransformerWrapper, dim_in=8, dim_out=8, max_seq_len=LENGTH)
    two = {
        f"{side}_{key}": value
        for side in ("enc", "dec")
        for key, value in {"num_tokens": TOKENS, "max_seq_len": LENGTH, "depth": DEPTH, "heads": HEADS}.items()
    }
    image = {"image_size": 16, "patch_size": 4, "num_classes": 5}
    return {
        "Decoder": lambda: _language(library, decoder()),
        "Encoder": lambda: _language(library, encoder()),
        "PrefixDecoder": lambda: _language(library, _stack(library.PrefixDecoder, {})),
        "tie_embedding": lambda: _language(library, decoder(), tie_embedding=True),
        "memory_tokens": lambda: _language(library, decoder(), num_memory_tokens=2),
        "cls_token": lambda: _language(library, encoder(), use_cls_token=True, logits_dim=5),
        "attn_pool": lambda: _language(library, encoder(), attn_pool=True, logits_dim=5),
        "average_pool": lambda: _language(library, encoder(), average_pool_embed=True, logits_dim=5),
        "scaled_sinu_pos_emb": lambda: _language(library, decoder(), scaled_sinu_pos_emb=True),
        "l2norm_embed": lambda: _language(library, decoder(), l2norm_embed=True),
        "mixture_of_softmax": lambda: _language(library, decoder(), mixture_of_softmax=True),
        "recycling": lambda: _language(library, decoder(), recycling=True, train_max_recycle_steps=1),
        "ViTransformerWrapper": lambda: library.ViTransformerWrapper(**image, attn_layers=encoder()),
        "AutoregressiveWrapper": lambda: library.AutoregressiveWrapper(_language(library, decoder())),
        "BeliefStateWrapper": lambda: library.BeliefStateWrapper(
            forward_decoder=_language(library, decoder()), backward_decoder=_language(library, decoder())
        ),
        "ContinuousTransformerWrapper": lambda: continuous(attn_layers=decoder()),
        "ContinuousAutoregressiveWrapper": lambda: library.ContinuousAutoregressiveWrapper(
            continuous(attn_layers=decoder())
        ),
        "XTransformer": lambda: library.XTransformer(dim=WIDTH, **two),
        "MultiInputTransformerWrapper": lambda: library.MultiInputTransformerWrapper(
            num_tokens={"words": TOKENS, "pitches": TOKENS}, max_seq_len=LENGTH, attn_layers=decoder()
        ),
        "XLAutoregressiveWrapper": lambda: library.XLAutoregressiveWrapper(
            _language(library, decoder(), max_mem_len=8)
        ),
        "NeoMLP": lambda: library.NeoMLP(dim_in=5, dim_hidden=5, dim_out=4, dim_model=WIDTH, depth=DEPTH),
    }


def _batches(model: nn.Module) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(TOKENS, (SAMPLES, LENGTH), generator=generator)
    numbers = torch.randn(SAMPLES, LENGTH, 8, generator=generator)
    known = takes(model.forward)
    first = first_input(model)
    if "tgt" in known:
        yield {"src": tokens, "tgt": tokens}
    yield {first: tokens}
    yield {first: tokens, "condition": torch.randn(SAMPLES, WIDTH, generator=generator)}
    yield {first: tokens, "context": torch.randn(SAMPLES, 8, WIDTH, generator=generator)}
    yield {first: numbers}
    yield {first: torch.randn(SAMPLES, 3, 16, 16, generator=generator)}
    yield {first: torch.randn(SAMPLES, 5, generator=generator)}
