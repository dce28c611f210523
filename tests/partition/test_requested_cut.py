"""The cut is where it was asked for, gradients are those of one process, and every refusal says what would do."""

import re
from itertools import pairwise

import pytest
from networks import IMAGES, ROWS, Chain, Network, cut, refused
from support import assert_near, boosted, image_batch, model_loss, tiny_vit
from torch import nn

from hybridpp.config import PartitionConfig
from hybridpp.errors import ConfigError, PartitionError
from hybridpp.partition import find_units

BLOCKS = [f"layer{layer}.{block}" for layer in (1, 2, 3, 4) for block in (0, 1)]


def held(*units):
    """The modules with parameters in these units of a Network."""
    inner = [f"{unit}.{part}" if "layer" in unit else unit for unit in units for part in ("conv", "shortcut")]
    return " ".join(sorted(set(inner)))


@pytest.mark.parametrize(
    ("counts", "first_blocks"), [([2, 6], [2]), ([7, 1], [7]), ([1, 3, 4], [1, 4]), ((2, 2, 2, 2), [2, 4, 6])]
)
def test_layers_per_stage_gives_each_stage_that_many_blocks(counts, first_blocks):
    names = cut(Network, IMAGES, len(counts), layers_per_stage=counts)
    ends = [0, *first_blocks, 8]
    blocks = [BLOCKS[start:end] for start, end in pairwise(ends)]
    assert names == [held("head", *blocks[0]), *(held(*part) for part in blocks[1:-1]), held(*blocks[-1], "fc")]


def test_num_layers_per_stage_is_the_same_setting():
    assert cut(Network, IMAGES, 2, num_layers_per_stage=[1, 7])[0] == held("head", "layer1.0")


def test_layers_per_stage_of_a_transformer():
    first, last = cut(tiny_vit, image_batch(4), 2, layers_per_stage=[1, 3], criterion=model_loss)
    assert "vit.layers.0" in first
    assert "vit.layers.1" not in first
    assert all(f"vit.layers.{n}" in last for n in (1, 2, 3))


@pytest.mark.parametrize(
    ("points", "first_of_stage"),
    [
        ({"layer2": "after"}, ["head", "layer3"]),
        ({"layer3": "before"}, ["head", "layer3"]),
        ({"head": "after"}, ["head", "layer1"]),
        ({"fc": "before"}, ["head", "fc"]),
        # In any order; inside a list of blocks too.
        ({"layer4.1": "before", "layer1": "after"}, ["head", "layer2", "layer4.1"]),
        # More stages than the model has big lists: a named module is never taken apart.
        (
            dict.fromkeys(("layer2", "layer3", "layer4", "fc"), "before"),
            ["head", "layer2", "layer3", "layer4", "fc"],
        ),
    ],
)
def test_split_points_cut_before_or_after_a_module(points, first_of_stage):
    names = cut(Network, IMAGES, len(first_of_stage), split_points=points)
    order = ["head", *BLOCKS, "fc"]
    starts = [next(at for at, unit in enumerate(order) if unit.startswith(first)) for first in first_of_stage]
    assert names == [held(*order[start:end]) for start, end in pairwise([*starts, len(order)])]


def test_a_module_with_split_points_around_it_is_a_stage_of_its_own():
    names = cut(Chain, ROWS, 3, split_points={"layer0": "after", "layer1": "after"})
    assert names == ["layer0.0", "layer1.0", "layer2.0"]


def test_split_points_inside_a_block():
    # To rounding: two stages add to the gradient of what goes around the cut, in another order than one.
    first, last = cut(
        tiny_vit,
        image_batch(4),
        2,
        criterion=model_loss,
        compare=assert_near,
        split_points={"vit.layers.1.mlp": "before"},
    )
    assert "vit.layers.1.mlp.fc1" not in first
    assert "vit.layers.1.mlp.fc1" in last
    assert "vit.layers.1.layernorm_after" in first


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"layers_per_stage": [2, 0]},
            "layers_per_stage needs an integer of at least 1 for every stage: got [2, 0].",
        ),
        ({"layers_per_stage": []}, "layers_per_stage needs an integer of at least 1 for every stage: got []."),
        (
            {"layers_per_stage": [1.5, 6.5]},
            "layers_per_stage needs an integer of at least 1 for every stage: got [1.5, 6.5].",
        ),
        (
            {"layers_per_stage": [4, 4], "split_points": {"layer1": "after"}},
            "give layers_per_stage or split_points, not both: got [4, 4] and {'layer1': 'after'}.",
        ),
        (
            {"split_points": ["layer1"]},
            "split_points must be a dict from module names to 'before' or 'after': got ['layer1'].",
        ),
        (
            {"split_points": {"layer1": "behind"}},
            "a side in split_points must be 'before' or 'after': got 'behind' for 'layer1'.",
        ),
        ({"balance": "memory"}, "balance must be one of flops, parameters, time: got 'memory'."),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_is_cut(settings, text):
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}$"):
        PartitionConfig(**settings)
    refused(ConfigError, text, Network, IMAGES, 2, **settings)


@pytest.mark.parametrize(
    ("pp_size", "settings", "text"),
    [
        (
            2,
            {"layers_per_stage": [4, 3]},
            "layers_per_stage needs one count per stage, and all 8 blocks in the sum: got [4, 3] (sum 7) for 2 stages. "
            "Balanced would be [4, 4].",
        ),
        (
            3,
            {"layers_per_stage": [4, 4]},
            "layers_per_stage needs one count per stage, and all 8 blocks in the sum: got [4, 4] (sum 8) for 3 stages. "
            "Balanced would be [2, 3, 3].",
        ),
        (
            2,
            {"split_points": {"layer5": "after"}},
            "Network has no module 'layer5'. Did you mean layer4 or layer3 or layer2?",
        ),
        (2, {"split_points": {"zzz": "after"}}, "Network has no module 'zzz'. See model.named_modules()."),
        (
            2,
            {"split_points": {"unused": "after"}},
            "the forward does not call 'unused', so it cannot be cut there. Name another module.",
        ),
        (
            2,
            {"split_points": {"head": "before"}},
            "nothing runs before 'head', so a cut there leaves a stage empty. Remove it.",
        ),
        (
            2,
            {"split_points": {"fc": "after"}},
            "nothing runs after 'fc', so a cut there leaves a stage empty. Remove it.",
        ),
        (
            3,
            {"split_points": {"layer2": "after"}},
            "split points give one stage more than there are points: got 1 different ones (after layer2), 3 stages. "
            "Give 2, or use pp_size=2.",
        ),
        (
            3,
            {"split_points": {"layer2": "after", "layer3": "before"}},
            "split points give one stage more than there are points: got 1 different ones (after layer2, before "
            "layer3), 3 stages. Give 2, or use pp_size=2.",
        ),
        (
            2,
            {"split_points": {"layer2": "after", "layer2.0": "after"}},
            "a module and a module inside it cannot both be split points: got 'layer2' and 'layer2.0'. Remove one.",
        ),
    ],
)
def test_a_cut_that_the_model_does_not_allow(pp_size, settings, text):
    class Spare(Network):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(1, 1)

    Spare.__name__ = "Network"
    refused(PartitionError, text, Spare, IMAGES, pp_size, **settings)


def test_named_modules_are_blocks_of_their_own():
    assert find_units(Network(), 5, ["layer3", "head"]).blocks == (
        "head",
        "layer1.0",
        "layer1.1",
        "layer2.0",
        "layer2.1",
        "layer3",
        "layer4.0",
        "layer4.1",
    )


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"layers_per_stage": [2, 2]}, "one stage is not cut: got layers_per_stage=[2, 2] with pp_size=1."),
        ({"split_points": {"0": "after"}}, "one stage is not cut: got split_points={'0': 'after'} with pp_size=1."),
    ],
)
def test_a_cut_of_one_stage_is_refused(settings, text):
    with pytest.raises(PartitionError, match=re.escape(text)):
        boosted(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), None, None, **settings)
