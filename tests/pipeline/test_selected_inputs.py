"""What a script selects of a batch for the model."""

import pytest

from hybridpp.errors import ConfigError, DataError
from hybridpp.pipeline import ForwardSignature, with_selection

PAIR, DICT = ("image", 3), {"image": "image", "mask": "mask", "label": 3}


def selected(model_inputs, forward=lambda image, mask=None: None):
    return with_selection(ForwardSignature.of(forward, "Model"), model_inputs)


@pytest.mark.parametrize(
    ("model_inputs", "batch", "inputs", "rest"),
    [
        (0, PAIR, ("image",), [1]),
        ([0], list(PAIR), ("image",), [1]),
        ([-1, 0], ("mask", 3, "image"), ("image", "mask"), [1]),
        ("image", DICT, {"image": "image"}, ["mask", "label"]),
        (("mask", "image"), DICT, {"mask": "mask", "image": "image"}, ["label"]),
        ({"image": 0}, PAIR, {"image": "image"}, [1]),
        ({"image": "mask"}, DICT, {"image": "mask"}, ["image", "label"]),
    ],
)
def test_the_model_gets_the_selection_and_the_rest_is_left(model_inputs, batch, inputs, rest):
    signature = selected(model_inputs)
    assert signature.model_inputs(batch) == inputs
    assert signature.extra_entries(batch) == rest


def test_without_a_selection_the_signature_says_it():
    signature = ForwardSignature.of(lambda image: None, "Model")
    assert with_selection(signature, None) is signature


def test_a_forward_that_takes_anything_gets_the_selection():
    signature = selected("image", lambda **inputs: None)
    assert signature.model_inputs(DICT) == {"image": "image"}


@pytest.mark.parametrize("model_inputs", [[], {}, (), 1.5, [True], [["image"]], ["a", "a"], {0: "image"}])
def test_what_is_no_selection_is_refused(model_inputs):
    with pytest.raises(ConfigError, match="model_inputs must be names or indices of entries of a batch, each once"):
        selected(model_inputs)


@pytest.mark.parametrize(
    ("model_inputs", "batch", "message"),
    [
        ("images", DICT, "selects 'images' of a batch: got a dict of image, mask, label"),
        (2, PAIR, "selects 2 of a batch: got 2 entries"),
        ("image", PAIR, "selects 'image' of a batch: got 2 entries"),
        (0, 1.0, "selects 0 of a batch: got a single tensor"),
        (["image", "label"], DICT, "the forward of Model takes no argument 'label'. Select others, or name"),
        ([0, 1, 2], (1, 2, 3), "the forward of Model takes at most 2 entries"),
        ("mask", DICT, "the forward of Model needs 'image'"),
    ],
)
def test_a_selection_that_does_not_fit_is_refused(model_inputs, batch, message):
    with pytest.raises(DataError, match=message):
        selected(model_inputs).model_inputs(batch)
