"""Estimates of mixtures of experts against formulas that one writes by hand: ``N`` tokens, ``k`` experts of each."""

import pytest
import torch
from hybridpp_plugins.estimate_batch import BatchSource
from hybridpp_plugins.estimate_runs import EstimateRuns, RunKind
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from hybridpp.config import Precision

N, H, E, K, WIDTH = 512, 256, 8, 2, 512
SIZES = {
    "vocab_size": 64,
    "hidden_size": H,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": K,
    "use_cache": False,
}


def mixtral(**more):
    config = MixtralConfig(**SIZES, intermediate_size=WIDTH, num_local_experts=E)
    return MixtralForCausalLM._from_config(config, **more)


def qwen():
    config = Qwen3MoeConfig(**SIZES, intermediate_size=WIDTH, moe_intermediate_size=WIDTH, num_experts=E, head_dim=128)
    return Qwen3MoeForCausalLM(config)


def deepseek():
    config = DeepseekV3Config(
        **SIZES,
        intermediate_size=WIDTH,
        moe_intermediate_size=WIDTH,
        n_routed_experts=E,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=0,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_rope_head_dim=32,
        qk_nope_head_dim=32,
        v_head_dim=32,
    )
    return DeepseekV3ForCausalLM(config)


def gpt_oss():
    return GptOssForCausalLM(GptOssConfig(**SIZES, intermediate_size=WIDTH, num_local_experts=E, head_dim=128))


class Gated(nn.Module):
    """An expert."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(H, WIDTH, bias=False), nn.Linear(H, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, H, bias=False)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Listed(nn.Module):
    """A list of experts, of which each takes its tokens: as one writes it, and as older models have it."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(H, E, bias=False)
        self.experts = nn.ModuleList(Gated() for _ in range(E))

    def forward(self, x):
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1, dtype=torch.float32).topk(K)
        result = torch.zeros_like(flat)
        mask = nn.functional.one_hot(chosen, E).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            place, rows = torch.where(mask[number])
            if not len(rows):
                continue
            result.index_add_(0, rows, expert(flat[rows]) * weights[rows, place, None].to(x.dtype))
        return x + result.view_as(x)


class Masked(Listed):
    """The same with masks of tokens, and a router that sorts."""

    def forward(self, x):
        flat = x.flatten(0, 1)
        scores, order = self.router(flat).sort(dim=-1, descending=True)
        result = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            is_here = order[:, :K] == number
            rows = is_here.any(-1)
            result[rows] = result[rows] + expert(flat[rows]) * scores[:, :K][is_here].unsqueeze(-1)
        return x + result.view_as(x)


def own(block):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(block(), block())
            self.head = nn.Linear(H, 4)

        def forward(self, x):
            return self.head(self.blocks(x))

    return Model()


def recorded(model, part, tp_size=1, precision=Precision.BF16):
    """Bytes that are held of a call of the part, and FLOPs of its forward and of the backward passes of all parts."""
    transformers = hasattr(model, "config")
    sample = None if transformers else torch.empty(1, N, H)
    batches = BatchSource(sequence_length=N if transformers else None, sample=sample)
    runs = EstimateRuns(model, precision=precision, batches=batches, device="cuda")
    run = runs.run(RunKind(tp_size=tp_size), tuple(part.format(layer) for layer in range(2)))
    call = run.calls[1]
    index, at = run.saved
    held = {int(i) for i, event in zip(index, at, strict=True) if call.begin < event <= call.end + 1}
    inside = [i for i in held if call.begin < run.born[i] <= call.end]
    flops = [op.flops for op in run.ops if call.begin < op.event <= call.end]
    grouped = [op.flops for op in run.ops if op.kernel == "experts"]
    return sum(int(run.sizes[i]) for i in inside), sum(flops), sum(grouped)


ROWS = N * K
# In bf16, of each row: as it comes to its expert, both halves of what is computed first, one of them activated, their
# product, and the result, which is multiplied by a weight.
HELD = 2 * ROWS * (H + 2 * WIDTH + WIDTH + WIDTH + H)
# What is added to the rows where it belongs.
ADDED = 2 * ROWS * H
FLOPS = 2 * ROWS * 3 * H * WIDTH


def on_meta(make, *args, **kwargs):
    with torch.device("meta"):
        return make(*args, **kwargs)


@pytest.mark.parametrize("make", [mixtral, qwen, deepseek])
def test_experts_of_transformers_hold_and_compute_what_their_tokens_need(make):
    held, flops, grouped = recorded(on_meta(make), "model.layers.{}.mlp.experts")
    assert held == pytest.approx(HELD, rel=0.1)
    assert flops == FLOPS
    # Two layers, forward and two products each backward.
    assert grouped == 2 * 3 * FLOPS


@pytest.mark.parametrize("make", [mixtral, deepseek])
def test_experts_are_estimated_in_every_format(make):
    held, flops, _ = recorded(on_meta(make), "model.layers.{}.mlp.experts", precision=Precision.FP16)
    assert held == pytest.approx(HELD, rel=0.1)
    assert flops == FLOPS
    held, flops, _ = recorded(on_meta(make), "model.layers.{}.mlp.experts", precision=Precision.FP32)
    assert held == pytest.approx(2 * HELD, rel=0.1)
    assert flops == FLOPS


def test_tokens_are_routed_alike_by_a_loop_over_experts():
    model = on_meta(mixtral)
    model.set_experts_implementation("eager")
    held, flops, _ = recorded(model, "model.layers.{}.mlp.experts")
    assert held == pytest.approx(HELD + ADDED, rel=0.1)
    assert flops == FLOPS


@pytest.mark.parametrize("block", [Listed, Masked])
def test_tokens_are_routed_alike_by_code_of_ones_own(block):
    held, flops, _ = recorded(on_meta(own, block), "blocks.{}")
    assert held == pytest.approx(HELD + ADDED, rel=0.1)
    assert flops == FLOPS + 2 * N * H * E


def test_experts_with_a_gate_of_their_own_hold_what_that_keeps():
    held, flops, _ = recorded(on_meta(gpt_oss), "model.layers.{}.mlp.experts")
    assert flops == FLOPS
    # Both halves; the first one clamped, its sigmoid, and their product; the second one plus 1; the product of these.
    assert held == pytest.approx(2 * ROWS * (H + 2 * WIDTH + 3 * WIDTH + WIDTH + WIDTH + H), rel=0.1)


def test_ranks_that_share_experts_compute_their_share():
    held, flops, _ = recorded(on_meta(mixtral), "model.layers.{}.mlp.experts", tp_size=2)
    assert held == pytest.approx(2 * ROWS * (H + (2 * WIDTH + WIDTH + WIDTH) // 2 + H), rel=0.1)
    assert flops == FLOPS // 2
