"""One description of how a model is sharded: names, shards, and the text that users write for it."""

import pytest
import torch
from torch import nn

from hybridpp.cluster import Loopback, current_world
from hybridpp.module_adapter import ModuleAdapter
from hybridpp.sharding_plan import DimShard, ShardingSpec, spec_of_styles, styles_of_spec
from hybridpp.tensor_parallel import shard, sharding_of

SPEC = ShardingSpec(
    params={"up.weight": DimShard(0, (8,)), "": DimShard(1, (4,))},
    copy_inputs=frozenset({"up"}),
    partial_grad=frozenset({"norm.weight"}),
    attributes={("", "num_heads"): 2},
    local_width_args={("up", 0): 4},
)


@pytest.mark.parametrize("block", ["", "layers.1"])
def test_names_go_into_a_model_and_back_into_its_block(block):
    outside = SPEC.inside(block)
    assert outside.of_block(block) == SPEC
    assert outside.attributes == {(block, "num_heads"): 2}


def test_a_block_gets_nothing_of_other_blocks():
    assert SPEC.inside("layers.1").of_block("layers.11") == ShardingSpec()
    assert SPEC.inside("layers.11").of_block("layers.1") == ShardingSpec()


def test_of_two_specs_the_second_counts_where_they_differ():
    both = SPEC | ShardingSpec(params={"up.weight": DimShard(1, (4,))}, copy_inputs=frozenset({"gate"}))
    assert both.params == {"up.weight": DimShard(1, (4,)), "": DimShard(1, (4,))}
    assert both.copy_inputs == {"up", "gate"}


def test_positions_and_shards_agree():
    one = DimShard(0, (6, 2, 2), (1, 2, 2))
    full = torch.arange(10)
    assert [one.take(full, rank, 2).tolist() for rank in range(2)] == [[0, 1, 2, 6, 7, 8, 9], [3, 4, 5, 6, 7, 8, 9]]
    assert [full[one.index(rank, 2, 10)].tolist() for rank in range(2)] == [
        one.take(full, rank, 2).tolist() for rank in range(2)
    ]


STYLES = {
    "qkv": "fused_column:concatenated:3",
    "shared": "column:2",
    "row": "row",
    "head": "gathered_column",
    "table": "vocab",
    "norm": "partial_grad",
}


def layers() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "qkv": nn.Linear(8, 24),
            "shared": nn.Linear(8, 8),
            "row": nn.Linear(8, 8),
            "head": nn.Linear(8, 5),
            "table": nn.Embedding(7, 8),
            "norm": nn.LayerNorm(2),
            "rest": nn.Linear(8, 8),
        }
    )


def test_styles_become_a_spec_and_the_spec_says_the_styles():
    model = layers()
    spec = spec_of_styles(model, {**STYLES, "rest": "replicated"}, 4)
    assert spec.params["qkv.bias"] == DimShard(0, (8, 8, 8))
    assert spec.params["shared.weight"] == DimShard(0, (8,), (2,))
    assert "row.bias" not in spec.params
    assert styles_of_spec(model, spec, 4) == STYLES


@pytest.mark.parametrize("share_memory", [True, False])
def test_only_trials_keep_views_of_the_full_parameters(share_memory):
    def run():
        group = current_world().split([range(2)])
        model = nn.ModuleDict({"up": nn.Linear(8, 12), "down": nn.Linear(12, 8)})
        full = {name: (p.data.clone(), p.data.untyped_storage().data_ptr()) for name, p in model.named_parameters()}
        sharded = shard(
            ModuleAdapter(model),
            spec_of_styles(model, {"up": "column", "down": "row"}, 2),
            group,
            share_memory=share_memory,
        )
        assert len(sharded.layers) == 2
        for name in ("up.weight", "up.bias", "down.weight"):
            parameter = model.get_parameter(name)
            assert torch.equal(parameter.data, sharding_of(parameter).take(full[name][0], group.rank))
            assert (parameter.data.untyped_storage().data_ptr() == full[name][1]) is share_memory
        assert sharding_of(model["down"].bias) is None

    Loopback(2).run(run)
