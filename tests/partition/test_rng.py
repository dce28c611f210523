"""Places of random numbers inside units."""

import warnings

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hybridpp.partition.rng import inner_linear_layers


def test_linear_layers_of_any_class_are_places_and_nothing_else_is():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.Linear(2, 2))
    block = nn.ModuleDict(
        {
            "linear": nn.Linear(2, 2),
            "conv1d": Conv1D(2, 2),
            "embedding": nn.Embedding(2, 2),
            "norm": nn.LayerNorm(2),
            "scripted": scripted,
            "attention": nn.MultiheadAttention(2, 1),
        }
    )
    model = nn.ModuleDict({"block": block, "head": nn.Linear(2, 2)})
    assert inner_linear_layers(model, ["block", "head"]) == ("block.linear", "block.conv1d", "block.attention.out_proj")
