"""Where samples lie in a batch, and in what a model returns."""

import re
from collections import namedtuple

import pytest
import torch
from transformers.modeling_outputs import ImageClassifierOutput

from hybridpp.errors import DataError
from hybridpp.pipeline import leaf_dims, merge_outputs, num_samples, split_batch

SRC, MASK = torch.arange(12.0).reshape(3, 4), torch.ones(3, 3)
PAIR = namedtuple("pair", "a b")(SRC, MASK)


@pytest.mark.parametrize(
    ("tree", "dims", "expected"),
    [
        ({"src": SRC, "mask": MASK}, 0, [0, 0]),
        ({"src": SRC, "mask": MASK}, None, [None, None]),
        ({"src": SRC, "mask": MASK}, {"src": 1, "mask": None}, [1, None]),
        ({"src": SRC, "rest": (MASK, [SRC])}, {"rest": (None, 1)}, [0, None, 1]),
        ({"src": SRC, "rest": (MASK, [SRC])}, {"rest": (None, [2])}, [0, None, 2]),
        ((SRC, MASK, SRC), (1, None), [1, None, 0]),
        ([SRC, {"mask": MASK}], [1, {"mask": None}], [1, None]),
        (SRC, 1, [1]),
        (SRC, {"src": 1}, [0]),
        (PAIR, (1, None), [1, None]),
        ([PAIR], [{"b": None}], [0, None]),
        (ImageClassifierOutput(logits=SRC, hidden_states=(MASK,)), {"logits": 1, "hidden_states": None}, [1, None]),
    ],
)
def test_each_leaf_has_the_dimension_that_its_place_in_the_batch_is_given(tree, dims, expected):
    assert leaf_dims(tree, dims) == expected


def test_a_slip_in_a_name_is_told():
    with pytest.raises(
        DataError,
        match=re.escape("batch_dims must use the names of the batch's entries: there is 'mask', not 'masks'."),
    ):
        leaf_dims({"src": SRC, "mask": MASK}, {"masks": None})


def test_a_name_that_a_batch_has_not_got_says_nothing():
    assert leaf_dims({"src": SRC}, {"src": 1, "mask": None}) == [1]


def test_a_batch_is_split_where_its_samples_are():
    batch = split_batch(
        {"src": SRC, "mask": MASK}, num_microbatches=2, microbatch_size=None, dims={"src": 1, "mask": None}
    )
    assert [microbatch.num_samples for microbatch in batch.microbatches] == [2, 2]
    for microbatch, part in zip(batch.microbatches, SRC.split(2, 1), strict=True):
        assert torch.equal(microbatch.inputs["src"], part)
        assert microbatch.inputs["mask"] is MASK


def test_tensors_disagree_along_their_own_dimensions():
    text = "must agree in the dimension of the samples (batch_dims={'a': 1}): got ['a']: 4, ['b']: 3."
    with pytest.raises(DataError, match=re.escape(text)):
        num_samples({"a": SRC, "b": MASK}, {"a": 1})


def test_a_tensor_without_the_dimension_is_named():
    text = (
        "batch_dims puts the samples in dimension 1: ['y'] has shape (4,). Set a dimension for every entry: batch_dims="
    )
    with pytest.raises(DataError, match=re.escape(text)):
        num_samples({"x": SRC, "y": torch.zeros(4)}, 1)


def test_outputs_are_put_together_where_their_samples_are():
    batch = split_batch(SRC, num_microbatches=2, microbatch_size=None, dims=1)
    parts = [(mb.inputs * 2, mb.inputs[0], MASK) for mb in batch.microbatches]
    merged = merge_outputs(parts, batch.microbatches, (1, 0, None))
    assert torch.equal(merged[0], SRC * 2)
    assert torch.equal(merged[1], SRC[0])
    assert merged[2][0] is MASK


def _targets(*counts):
    return [{"boxes": torch.rand(count, 4), "id": torch.tensor(count)} for count in counts]


def _split(batch, dims=0):
    return [one.inputs for one in split_batch(batch, num_microbatches=2, microbatch_size=None, dims=dims).microbatches]


@pytest.mark.parametrize("counts", [(3, 1, 2, 4), (4, 4, 4, 4), (1, 1, 1, 1), (0, 0, 0, 0)])
def test_a_list_of_dicts_beside_as_many_samples_has_an_entry_for_each(counts):
    images, targets = torch.randn(4, 3), _targets(*counts)
    first, second = _split({"images": images, "targets": targets})
    assert (len(first["images"]), first["targets"], second["targets"]) == (2, targets[:2], targets[2:])
    for batch in ((images, targets), (images, tuple(targets))):
        first, second = _split(batch)
        assert (list(first[1]), list(second[1])) == (targets[:2], targets[2:])
    assert num_samples({"images": images, "targets": targets}) == 4


def test_a_list_of_tensors_is_of_samples_where_they_have_other_rows():
    images, ragged, views = torch.randn(4, 3), [torch.rand(n, 2) for n in (4, 1, 4, 4)], [torch.rand(4, 2)] * 4
    first, _ = _split({"images": images, "ragged": ragged, "views": views})
    assert first["ragged"] == ragged[:2]
    assert [tuple(one.shape) for one in first["views"]] == [(2, 2)] * 4


def test_what_is_said_of_a_list_counts():
    images, targets = torch.randn(3, 4), _targets(4, 4, 4, 4)
    first, _ = _split({"images": images, "targets": targets, "rest": targets[:2]}, {"images": 1, "rest": None})
    assert (first["images"].shape, first["targets"], len(first["rest"])) == ((3, 2), targets[:2], 2)
    with pytest.raises(DataError, match="all tensors of a batch must agree"):
        _split({"images": images.T, "targets": _targets(5, 5, 5)})
    said = _split({"images": images.T, "targets": targets}, {"targets": 0})
    assert [len(one["targets"]) for one in said] == [4, 4]
