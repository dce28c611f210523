"""Code that may draw in later forwards, found by the names of what it calls."""

import torch
from support import tiny_vit
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from hybridpp.partition import finest_units
from hybridpp.partition.drawing_code import ConditionalDraws, is_rate, may_draw


def helper(x):
    return torch.bernoulli(x)


class Calls(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.config = nn.Module()

    def method(self, x):
        return helper(x)


def module(forward, **attributes):
    """A module whose class has this forward."""
    made = type("Made", (Calls,), {"forward": forward})(forward)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def test_names_of_functions_in_the_forward_and_in_what_it_calls():
    assert may_draw(module(lambda self, x: x + torch.randn_like(x)))
    assert may_draw(module(lambda self, x: self.method(x)))
    assert may_draw(module(lambda self, x: [helper(y) for y in x]))
    assert not may_draw(module(lambda self, x: torch.relu(x)))


def test_dropout_counts_where_no_rate_is_part_of_the_mode():
    def forward(self, x):
        return functional.dropout(x, self.config.p)

    assert may_draw(module(forward))
    assert not may_draw(module(forward, attention_dropout=0.1))
    assert is_rate("rate", 0.0)
    assert is_rate("p", 1)
    assert not is_rate("p", None)
    assert not is_rate("eps", 0.1)


def test_torchs_modules_draw_by_their_mode():
    for kind in (nn.Dropout, nn.MultiheadAttention, nn.RReLU, nn.Sequential):
        assert not may_draw(kind(*([4, 2] if kind is nn.MultiheadAttention else [])))


def test_usual_models_have_none():
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=32, use_cache=False
    )
    for model in (tiny_vit(0.1), LlamaForCausalLM(config)):
        assert ConditionalDraws.of(model, finest_units(model)) == ConditionalDraws()
