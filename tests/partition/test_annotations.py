"""Marks on modules and sequences, set before the model is boosted, on the small networks of well-known tutorials."""

import copy
import re

import pytest
import torch
from networks import IMAGES, ROWS, SEQUENCE, Chain, Network, ResNet, cut, refused
from support import image_batch, model_loss, tiny_vit, train
from torch import nn

from hybridpp.errors import PartitionError
from hybridpp.partition import annotate_split_points, set_execution_sequence

TUTORIAL = {"head": 0, "layer1": 0, "layer2": 0, "layer3": 1, "layer4": 1, "fc": 1}


def with_stages(stages):
    def make_model():
        model = Network()
        for name, stage in stages.items():
            model.get_submodule(name).pipeline_stage = stage
        return model

    return make_model


def with_points(points):
    def make_model():
        model = Chain()
        annotate_split_points(model, points)
        return model

    return make_model


def sequenced(model_class=ResNet, sequence=SEQUENCE):
    def make_model():
        model = model_class()
        set_execution_sequence(model, sequence)
        return model

    return make_model


def layers(names):
    """The outermost modules, per rank."""
    return [" ".join(sorted({name.partition(".")[0] for name in rank.split()})) for rank in names]


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        (TUTORIAL, ["head layer1 layer2", "fc layer3 layer4"]),
        # What is not marked goes with the marked module that follows; behind the last one, with that.
        ({"layer1": 0, "layer3": 1}, ["head layer1", "fc layer2 layer3 layer4"]),
        ({"head": 0, "layer2": 1, "fc": 2}, ["head", "layer1 layer2", "fc layer3 layer4"]),
        # The innermost mark counts.
        (TUTORIAL | {"layer1.0": 0, "layer1.0.conv": 0}, ["head layer1 layer2", "fc layer3 layer4"]),
        (TUTORIAL | {"layer2.1": 1}, ["head layer1 layer2", "fc layer2 layer3 layer4"]),
    ],
)
def test_modules_run_on_the_stage_that_is_set_on_them(stages, expected):
    assert layers(cut(with_stages(stages), IMAGES, max(stages.values()) + 1)) == expected


def test_marks_mean_nothing_to_a_model_in_one_piece():
    assert layers(cut(with_stages(TUTORIAL), IMAGES, 1)) == ["fc head layer1 layer2 layer3 layer4"]


def test_a_mark_on_a_list_is_one_on_its_modules():
    def make_model():
        torch.manual_seed(0)
        model = tiny_vit()
        model.vit.embeddings.pipeline_stage = model.vit.layers.pipeline_stage = 0
        model.classifier.pipeline_stage = model.vit.layernorm.pipeline_stage = 1
        return model

    assert cut(make_model, image_batch(4), 2, criterion=model_loss)[1] == "classifier vit.layernorm"


def test_a_setting_goes_before_marks():
    assert layers(cut(with_stages(TUTORIAL), IMAGES, 2, layers_per_stage=[2, 6]))[0] == "head layer1"


def test_a_property_of_the_class_is_no_mark():
    class Busy(nn.Sequential):
        @property
        def pipeline_stage(self):
            return 7

        split_point = "somewhere"

    def make_model():
        torch.manual_seed(0)
        return nn.Sequential(Busy(nn.Linear(4, 4)), Busy(nn.Linear(4, 4)))

    assert cut(make_model, ROWS, 2) == ["0.0", "1.0"]


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ({"layer0": "after", "layer1": "after"}, ["layer0.0", "layer1.0", "layer2.0"]),
        ({"layer1": "before"}, ["layer0.0", "layer1.0 layer2.0"]),
        ({"layer2": "before", "layer1": "before"}, ["layer0.0", "layer1.0", "layer2.0"]),
    ],
)
def test_a_model_is_cut_at_its_split_points(points, expected):
    assert cut(with_points(points), ROWS, len(expected)) == expected


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        (
            TUTORIAL | {"layer4": 0},
            "pipeline_stage must not decrease along the forward: 'layer4' has 0 and runs after a module of stage 1. "
            "Set it to 1 or more.",
        ),
        (
            {"layer1": 0, "layer2": 2},
            "pipeline_stage must use every stage from 0 to 1: got [0, 2]. Set them, or use pp_size=3.",
        ),
        ({"layer1": 1}, "pipeline_stage must use every stage from 0 to 1: got [1]. Set them, or use pp_size=2."),
        (
            {"layer1": "first"},
            "pipeline_stage must be the number of a stage, from 0: got 'first' on 'layer1'.",
        ),
    ],
)
def test_stage_numbers_that_do_not_fit(stages, text):
    refused(PartitionError, text, with_stages(stages), IMAGES, 2)


def test_a_stage_none_of_whose_modules_is_called():
    def make_model():
        model = with_stages({"head": 0})()
        model.spare = nn.Linear(1, 1)
        model.spare.pipeline_stage = 1
        return model

    refused(
        PartitionError,
        "the forward calls no module of stage 1. Set pipeline_stage on one it calls.",
        make_model,
        IMAGES,
        2,
    )


def test_both_kinds_of_marks():
    def make_model():
        model = with_stages({"head": 0, "fc": 1})()
        annotate_split_points(model, {"layer2": "after"})
        return model

    text = (
        "give either split points or stage numbers: got split points at layer2 and pipeline_stage on head, fc. "
        "Remove one kind."
    )
    refused(PartitionError, text, make_model, IMAGES, 2)


@pytest.mark.parametrize(
    ("points", "text"),
    [
        ({"layer9": "after"}, "Chain has no module 'layer9'. Did you mean layer2 or layer1 or layer0?"),
        ({"layer1": "END"}, "a split point must be 'before' or 'after' a module: got 'END' for 'layer1'."),
        ({"": "after"}, "Chain has no module ''. See model.named_modules()."),
    ],
)
def test_a_split_point_that_does_not_exist(points, text):
    with pytest.raises(PartitionError, match=f"^{re.escape(text)}$"):
        annotate_split_points(Chain(), points)


def test_a_sequence_is_cut_like_any_forward():
    assert layers(cut(sequenced(), IMAGES, 3, split_points={"layer1": "before", "layer2": "before"})) == [
        "bn1 conv1",
        "layer1",
        "fc layer2",
    ]
    assert len(cut(sequenced(), IMAGES, 2)) == 2


def test_a_sequence_gives_what_its_forward_written_out_gives():
    model = sequenced()()
    parts = dict(model.named_children())
    value = IMAGES
    for name in ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "avgpool"):
        value = parts[name](value)
    assert torch.equal(model(IMAGES), parts["fc"](value.flatten(1)))
    assert set(model.state_dict()) == set(ResNet().state_dict())


def test_callables_may_stand_in_front_or_alone():
    model = nn.ModuleDict({"scale": nn.Linear(4, 4)})
    set_execution_sequence(model, [torch.relu, "scale", (torch.negative, "front"), (torch.abs, "behind")])
    assert torch.equal(model(ROWS), model["scale"](-ROWS.relu()).abs())


def test_a_copy_of_a_sequence_runs_its_own_modules():
    model = sequenced(Chain, ["layer0", "layer1", "layer2"])()
    twin = copy.deepcopy(model)
    nn.init.zeros_(twin.layer2[0].weight)
    nn.init.zeros_(twin.layer2[0].bias)
    assert not twin(ROWS).any()
    assert model(ROWS).any()


@pytest.mark.parametrize(
    "batch",
    [(IMAGES, torch.arange(6) % 3), {"pixel_values": IMAGES, "labels": torch.arange(6) % 3}],
    ids=["tuple", "dict"],
)
def test_the_criterion_gets_labels_that_a_sequence_does_not_take(batch):
    def criterion(outputs, inputs):
        return nn.functional.cross_entropy(outputs, inputs["labels"] if isinstance(inputs, dict) else inputs[1])

    whole, halves = (
        train(sequenced(), [batch], pp_size=pp_size, num_microbatches=2, criterion=criterion) for pp_size in (1, 2)
    )
    assert halves["losses"][0] == whole["losses"][0]


@pytest.mark.parametrize(
    ("step", "text"),
    [
        ("conv9", "ResNet has no module 'conv9'. Did you mean conv1 or layer2.0.conv or layer1.0.conv?"),
        (7, "a step must be a module's name, a callable, or (callable, 'front' or 'behind'): got 7."),
        (
            ("fc", "behind"),
            "a step must be a module's name, a callable, or (callable, 'front' or 'behind'): got ('fc', 'behind').",
        ),
    ],
)
def test_a_step_that_is_none(step, text):
    with pytest.raises(PartitionError, match=f"^{re.escape(text)}$"):
        set_execution_sequence(ResNet(), ["conv1", step])
