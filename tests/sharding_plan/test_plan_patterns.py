"""What patterns of module names make of a model: styles, and attributes that count heads."""

import pytest
from torch import nn

from hybridpp.sharding_plan import plan_from_patterns


class Attention(nn.Module):
    """Four heads of 8 and two of keys and values, in attributes as models name them."""

    def __init__(self, num_kv_heads=2):
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = 4, num_kv_heads, 8
        self.num_key_value_groups = 4 // num_kv_heads
        self.layer_idx, self.is_causal = 4, True
        self.q_proj = nn.Linear(32, 32)
        self.k_proj = nn.Linear(32, 8 * num_kv_heads)
        self.o_proj = nn.Linear(32, 32)


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.n_head, self.split_size, self.embed_dim = 4, 32, 32
        self.c_attn = nn.Linear(32, 96)


ALL = {"*.q_proj": "column", "*.k_proj": "column", "*.o_proj": "row"}


def test_heads_are_counted_and_divided():
    plan = plan_from_patterns(nn.ModuleList([Attention()]), ALL, 2)
    assert plan.styles == {"0.q_proj": "column:4", "0.k_proj": "column:2", "0.o_proj": "row"}
    assert plan.spec.attributes == {("0", "num_heads"): 2, ("0", "num_key_value_heads"): 1}


@pytest.mark.parametrize(("size", "groups"), [(2, 2), (4, 1)])
def test_the_only_head_of_keys_and_values_is_copied(size, groups):
    plan = plan_from_patterns(nn.ModuleList([Attention(1)]), ALL, size)
    assert plan.styles["0.k_proj"] == "column:1"
    assert plan.spec.attributes["0", "num_key_value_groups"] == groups
    assert ("0", "num_key_value_heads") not in plan.spec.attributes


def test_widths_that_activations_are_split_by_are_divided():
    plan = plan_from_patterns(nn.ModuleList([Fused()]), {"*.c_attn": "fused_column:concatenated:3"}, 2)
    assert plan.spec.attributes == {("0", "n_head"): 2, ("0", "split_size"): 16}


def test_the_first_pattern_that_matches_counts_and_needs_no_prefix():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    assert plan_from_patterns(model, {"a": "row", "*.*": "column"}, 2).styles == {"a": "row", "b": "column"}
