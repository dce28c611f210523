"""Narrow copies of large blocks: what is found on them is what is found on the block."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, MixtralConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer

from hybridpp.plan_search import infer_plan, infer_sequence, narrowed_block
from hybridpp.sharding_plan import ShardingSpec
from hybridpp.sharding_plan.sharding_spec import DimShard


class Block(nn.Module):
    """Calls a layer of a language model with angles of its heads."""

    def __init__(self, layer, hidden, head):
        super().__init__()
        self.layer = layer
        angles = torch.randn(1, 5, head)
        self.call = (torch.randn(2, 5, hidden),), {"position_embeddings": (angles.cos(), angles.sin())}

    def forward(self, *args, **kwargs):
        return self.layer(*args, **kwargs)


def llama(kv_heads=4, heads=8, hidden=512, inner=768, **more):
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        attn_implementation="sdpa",
        **more,
    )
    with torch.device("meta"):
        layer = LlamaDecoderLayer(config, 0).eval()
    return Block(layer, hidden, config.head_dim)


def mixtral(num_experts):
    config = MixtralConfig(
        hidden_size=256,
        intermediate_size=256,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=num_experts,
        experts_implementation="batched_mm",
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        layer = MixtralDecoderLayer(config, 0).eval()
    return Block(layer, 256, 32)


def plans(block, tp_size):
    """The plan of a block, and how it runs on sequence shards."""
    model, calls = nn.Sequential(block), {"0": block.call}
    plan = infer_plan(model, ["0"], calls, tp_size)
    return plan, infer_sequence(model, ["0"], calls, plan.spec, tp_size)


def test_a_narrow_copy_for_many_ranks_does_for_fewer(monkeypatch):
    monkeypatch.setattr(narrowed_block, "_FEW", 2**16)
    copies, block = narrowed_block.NarrowCopies(8), llama(kv_heads=2)
    model, calls = nn.Sequential(block), {"0": block.call}
    for tp_size in (2, 4, 3):
        expected = infer_plan(model, ["0"], calls, tp_size)
        found = infer_plan(model, ["0"], calls, tp_size, copies=copies)
        assert found == expected
    # Three ranks do not divide what eight do, so they have a copy of their own.
    assert len(copies._made) == 2


@pytest.mark.parametrize(
    ("make", "tp_size"), [(lambda: llama(kv_heads=2), 4), (lambda: mixtral(6), 2)], ids=["shared heads", "experts"]
)
def test_the_plan_of_a_narrow_copy_is_that_of_the_block(monkeypatch, make, tp_size):
    monkeypatch.setattr(narrowed_block, "_FEW", 2**16)
    narrow = narrowed_block.narrowed_block(make(), [make().call], tp_size)
    assert narrow is not None
    assert narrow.share >= 2
    found, sequences = plans(make(), tp_size)
    monkeypatch.setattr(narrowed_block, "LARGE", 10**9)
    expected, expected_sequences = plans(make(), tp_size)
    assert found == expected
    assert found.spec.params
    assert sequences == expected_sequences
    assert sequences.blocks


def shapes(block, tp_size):
    narrow = narrowed_block.narrowed_block(block, [block.call], tp_size)
    assert narrow is not None
    return {name.removeprefix("layer."): tuple(held.shape) for name, held in narrow.block.named_parameters()}


def test_heads_and_what_the_ranks_divide_are_kept():
    found = shapes(llama(kv_heads=4, hidden=2048, heads=16, inner=5632), 4)
    # 16 heads of 16 channels, 4 of keys and values; 4 divides the inner width.
    assert found["self_attn.q_proj.weight"][0] == 16 * 16
    assert found["self_attn.k_proj.weight"][0] == 4 * 16
    assert found["mlp.up_proj.weight"][0] % 4 == 0
    assert shapes(llama(hidden=2048, inner=5634), 4)["mlp.up_proj.weight"][0] % 4


def test_experts_are_left_out_but_where_there_are_as_many_heads_of_keys(monkeypatch):
    monkeypatch.setattr(narrowed_block, "_FEW", 2**16)
    monkeypatch.setattr(narrowed_block, "LARGE", 2**16)
    assert shapes(mixtral(16), 2)["mlp.experts.down_proj"][0] == 8
    # Of 4 key heads on 4 ranks, a copy with 2 would say that ranks share them.
    assert shapes(mixtral(4), 4)["mlp.experts.down_proj"][0] == 4


class Written(nn.Module):
    """Has its width, and that of a head, in its code."""

    def __init__(self):
        super().__init__()
        self.q, self.o = nn.Linear(768, 768), nn.Linear(768, 768)

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[-1] == 768
        q = self.q(x).view(*x.shape[:2], -1, 64).transpose(1, 2)
        return self.o(functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2))


def test_a_block_that_has_its_width_in_its_code_is_tried_itself():
    model, call = nn.Sequential(Written()), ((torch.randn(2, 5, 768),), {})
    assert sum(held.numel() for held in model.parameters()) > narrowed_block.LARGE
    assert narrowed_block.narrowed_block(model[0], [call], 2) is None
    assert infer_plan(model, ["0"], {"0": call}, 2).styles == {"0.q": "column", "0.o": "row"}


def test_a_reason_names_the_sizes_of_the_block():
    block = llama(kv_heads=8, hidden=2048, heads=16, inner=5634)
    plan = infer_plan(nn.Sequential(block), ["0"], {"0": block.call}, 4)
    assert plan.reasons["0.layer.mlp.up_proj"].startswith("its width=5634 is not divisible by tp_size=4")


def test_sizes_of_a_spec_are_converted():
    block = llama(hidden=2048, inner=5632)
    narrow = narrowed_block.narrowed_block(block, [block.call], 2)
    spec = ShardingSpec(params={"layer.mlp.up_proj.weight": DimShard(0, (5632,))})
    inner = narrow.narrowed(spec)
    assert inner.params["layer.mlp.up_proj.weight"].widths == (
        narrow.block.get_parameter("layer.mlp.up_proj.weight").shape[0],
    )
    assert narrow.widened(inner) == spec
    # A part of which the copy has none.
    assert narrow.narrowed(ShardingSpec(params={"layer.mlp.up_proj.weight": DimShard(0, (5631, 1))})) is None
