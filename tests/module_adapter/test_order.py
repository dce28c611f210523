"""The declared order of layers is right: where two that meet on a module do not commute, the other order fails."""

from itertools import pairwise

import pytest
import torch
from support import assert_near, assert_same, image_batch, tiny_vit, train
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from hybridpp.module_adapter import ORDER, AdapterLayer, ModuleAdapter, order
from hybridpp.pipeline import WeightGradients

BATCH = [image_batch(4)]
IDS = torch.arange(16).reshape(2, 8) % 7
PLAN = {"*.[qkv]_proj": "column", "*.o_proj": "row", "*.fc1": "column", "*.fc2": "row"}
RECOMPUTES = {"gradient_checkpoint_config": {"gradient_checkpointing_ratio": 1.0}}
CHUNKS = {"num_microbatches": 2, "pp_size": 2}


def with_outside(inner, outer):
    """The declared order but for one layer, which is put just outside of another one."""
    others = [layer for layer in ORDER if layer is not inner]
    others.insert(others.index(outer) + 1, inner)
    return tuple(others)


def vit(dropout=0.0):
    return lambda: tiny_vit(dropout, num_layers=2)


def trained(make, **settings):
    return train(make, BATCH, **CHUNKS, **settings)["gradients"]


def check_split_shards():
    """Weight gradients of sharded layers that are deferred are those of unsharded ones."""
    sharded = trained(vit(), schedule="zb-h1", tp_size=2, tensor_parallel_plan=PLAN)
    assert_near(sharded, trained(vit()))


def check_dropout_of_schedules():
    """What dropout draws does not depend on the schedule."""
    assert_same(trained(vit(0.5), schedule="zb-h1"), trained(vit(0.5)))


def check_deferred_in_fp32():
    """Weight gradients of layers in fp32 are deferred in a half-precision model too."""
    deferred, try_defer = [], WeightGradients.try_defer

    def spy(self, task, *args):
        if taken := try_defer(self, task, *args):
            deferred.extend(task.binding.names)
        return taken

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightGradients, "try_defer", spy)
        trained(vit(), schedule="zb-h1", precision="bf16", fp32_modules=["*.fc1"])
    assert any(name.endswith("fc1.weight") for name in deferred)


def check_dropout_of_recomputed_blocks():
    """Recomputed blocks draw what they drew; so do blocks on another stage."""
    expected = train(vit(0.5), BATCH, num_microbatches=2)["gradients"]
    assert_same(trained(vit(0.5), **RECOMPUTES), expected)


class Encoder(nn.Module):
    """torch's own blocks, whose kernels refuse inputs of another dtype, and a loss inside."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x, labels):
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).mean(1), labels)


@pytest.fixture(scope="module")
def half_precision():
    return half_precision_gradients()


def half_precision_gradients():
    generator = torch.Generator().manual_seed(0)
    batch = (torch.randn(4, 3, 8, generator=generator), torch.tensor([0, 1, 2, 0]))
    settings = {"num_microbatches": 2, "precision": "bf16", "fp32_modules": ["blocks.0", "*.linear1"]}
    return train(Encoder, [batch], criterion=lambda outputs, inputs: outputs, **settings)["gradients"]


def graph_breaking(inner, x):
    torch._dynamo.graph_break()
    return inner(x)


def compiled(cache, inner, x):
    cache.append(cache.pop() if cache else torch.compile(inner, backend="eager", fullgraph=True))
    return cache[0](x)


def check_compiled_alone():
    """What is compiled is the user's forward, without collectives."""
    torch._dynamo.reset()
    module = nn.Linear(2, 2)
    adapter = ModuleAdapter(module)
    adapter.wrap(module, AdapterLayer.COMPILE, compiled, [])
    adapter.wrap(module, AdapterLayer.SHARD, graph_breaking)
    module(torch.ones(2))


MATTERS = {
    (AdapterLayer.COMPILE, AdapterLayer.SHARD): check_compiled_alone,
    (AdapterLayer.SHARD, AdapterLayer.WEIGHT_GRADIENTS): check_split_shards,
    (AdapterLayer.WEIGHT_GRADIENTS, AdapterLayer.DTYPE): check_deferred_in_fp32,
    (AdapterLayer.WEIGHT_GRADIENTS, AdapterLayer.LAYER_RNG): check_dropout_of_schedules,
}
COMMUTE = [
    (AdapterLayer.UNIT_RNG, AdapterLayer.RECOMPUTE),
    # Where a forward is called by name; else stages and RNG streams are around the hooks, and recomputation inside.
    (AdapterLayer.RECOMPUTE, AdapterLayer.STAGE),
    (AdapterLayer.UNIT_RNG, AdapterLayer.STAGE),
]
COMMUTE_IN_HALF_PRECISION = [
    (AdapterLayer.DTYPE, AdapterLayer.FUNCTION_DTYPES),
    (AdapterLayer.DTYPE, AdapterLayer.LAYER_RNG),
    (AdapterLayer.FUNCTION_DTYPES, AdapterLayer.UNIT_RNG),
    (AdapterLayer.FUNCTION_DTYPES, AdapterLayer.MODEL),
]
# Layers of sharding are for different modules: layers, regions between them, and blocks around those. Units are not
# inside of units, and the model is none. Shown by the models below, as far as they go.
NEVER_MEET = {
    (AdapterLayer.SHARD, AdapterLayer.SHARDED_ARGUMENTS),
    (AdapterLayer.SHARDED_ARGUMENTS, AdapterLayer.GATHERED_INPUTS),
    (AdapterLayer.GATHERED_INPUTS, AdapterLayer.LOCAL_WIDTH),
    (AdapterLayer.LOCAL_WIDTH, AdapterLayer.SEQUENCE_GATHER),
    (AdapterLayer.SEQUENCE_GATHER, AdapterLayer.SEQUENCE_REPLICATED),
    (AdapterLayer.SEQUENCE_REPLICATED, AdapterLayer.SEQUENCE_SHARD),
    (AdapterLayer.SEQUENCE_SHARD, AdapterLayer.WEIGHT_GRADIENTS),
    (AdapterLayer.FUNCTION_DTYPES, AdapterLayer.LAYER_RNG),
    (AdapterLayer.STAGE, AdapterLayer.MODEL),
}
# No package uses it yet: tests/module_adapter/test_seams.py has both.
PARAMETERS = {
    (AdapterLayer.LAYER_RNG, AdapterLayer.GATHER_PARAMETERS),
    (AdapterLayer.GATHER_PARAMETERS, AdapterLayer.UNIT_RNG),
}


def test_every_two_neighbours_are_looked_at():
    known = {*MATTERS, *COMMUTE, *COMMUTE_IN_HALF_PRECISION, *NEVER_MEET, *PARAMETERS}
    assert set(pairwise(ORDER)) <= known


@pytest.mark.parametrize("pair", MATTERS, ids=" inside ".join)
def test_a_pair_in_the_declared_order_is_right(pair):
    MATTERS[pair]()


@pytest.mark.parametrize("pair", MATTERS, ids=" outside ".join)
def test_a_pair_in_the_other_order_fails(pair, monkeypatch):
    monkeypatch.setattr(order, "ORDER", with_outside(*pair))
    with pytest.raises((AssertionError, torch._dynamo.exc.Unsupported)):
        MATTERS[pair]()


@pytest.mark.parametrize("pair", COMMUTE, ids=" and ".join)
def test_a_pair_commutes(pair, monkeypatch):
    monkeypatch.setattr(order, "ORDER", with_outside(*pair))
    check_dropout_of_recomputed_blocks()


@pytest.mark.parametrize("pair", COMMUTE_IN_HALF_PRECISION, ids=" and ".join)
def test_a_pair_commutes_in_half_precision(pair, monkeypatch, half_precision):
    monkeypatch.setattr(order, "ORDER", with_outside(*pair))
    assert_same(half_precision_gradients(), half_precision)


def mixtral():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(vocab_size=32, num_hidden_layers=2, num_local_experts=4, max_position_embeddings=16, **sizes)
    return MixtralForCausalLM(config)


@pytest.fixture(scope="module")
def meetings():
    """The sets of layers that modules carry, over models in several layouts."""
    found, put = set(), ModuleAdapter.wrap

    def noting(self, module, *args):
        put(self, module, *args)
        found.add(frozenset(self.layers_of(module)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModuleAdapter, "wrap", noting)
        trained(vit(0.5), precision="bf16", fp32_modules=["*.fc1"], **RECOMPUTES)
        for make, batch in ((vit(0.5), image_batch(4)), (mixtral, {"input_ids": IDS, "labels": IDS})):
            train(make, [batch], tp_size=2, enable_sequence_parallelism=True)
    return found


@pytest.mark.parametrize("pair", sorted(NEVER_MEET), ids=" and ".join)
def test_a_pair_never_meets_on_a_module(pair, meetings):
    assert not [layers for layers in meetings if layers.issuperset(pair)]


def test_layers_of_tensor_and_sequence_parallelism_are_met(meetings):
    met = frozenset().union(*meetings)
    assert {AdapterLayer.SHARD, AdapterLayer.SEQUENCE_GATHER, AdapterLayer.SEQUENCE_SHARD} <= met
    assert {AdapterLayer.SEQUENCE_REPLICATED, AdapterLayer.RECOMPUTE, AdapterLayer.MODEL} <= met
