"""Batches whose samples may not be where they are split."""

import re

import pytest
import torch
from torch import nn

from hybridpp.errors import DataError
from hybridpp.pipeline import check_batch_dims, split_batch, watch_sequence_axes


def check(batch, size=None, count=2):
    check_batch_dims(split_batch(batch, num_microbatches=count, microbatch_size=None), size)


X, ONES = torch.zeros(5, 8, 16), torch.ones(5, 5)
MASKS = {
    "additive": torch.full((5, 5), float("-inf")).triu(1),
    "bool": ONES.triu(1).bool(),
    "kept": ONES.tril().bool(),
    "backwards": ONES.triu(),
    "half": torch.full((5, 5), float("-inf"), dtype=torch.float16).triu(1),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_triangular_mask_is_not_split_without_a_word(mask):
    text = "['mask'] is a triangular mask of shape (5, 5), which samples usually share, but it would be split along"
    with pytest.raises(DataError, match=re.escape(text)):
        check({"x": X, "mask": mask})
    check({"x": X, "mask": mask}, count=1)


@pytest.mark.parametrize(
    "tensor",
    [
        ONES,
        ONES.tril().long(),
        torch.eye(5),
        torch.rand(5, 5),
        ONES.tril() + torch.diag(torch.arange(5.0)),
        torch.ones(5, 4).tril(),
        torch.ones(5, 5, 5).tril(),
    ],
)
def test_other_square_tensors_are_samples(tensor):
    check({"x": X, "other": tensor})


def test_two_samples_padded_to_a_triangle_are_samples():
    check({"mask": torch.ones(2, 2).tril().bool()})


SEQUENCES = torch.zeros(16, 4, 3)


@pytest.mark.parametrize("batch", [SEQUENCES, {"src": SEQUENCES, "tgt": SEQUENCES[..., 0]}])
def test_a_tensor_with_the_loader_batch_size_in_dim_1_is_not_split(batch):
    text = "the dataloader makes batches of 4 samples, but the batch's tensors have size 16 in dimension 0 and 4 in dim"
    with pytest.raises(DataError, match=re.escape(text)):
        check(batch, 4)


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (SEQUENCES, None),
        (SEQUENCES, 16),
        (SEQUENCES, 8),
        (torch.zeros(3, 4), 4),
        ({"crops": SEQUENCES, "labels": torch.zeros(16)}, 4),
        ({"crops": SEQUENCES, "other": torch.zeros(16, 7)}, 4),
    ],
)
def test_other_lengths_are_samples(batch, size):
    check(batch, size)


@pytest.mark.parametrize(
    ("module", "given", "expected"),
    [
        (nn.MultiheadAttention(8, 2), torch.zeros(2, 6, 8), ["'0' (MultiheadAttention, on [2, 6, 8])"]),
        (nn.LSTM(8, 8), torch.zeros(2, 6, 8), ["'0' (LSTM, on [2, 6, 8])"]),
        (nn.MultiheadAttention(8, 2), torch.zeros(6, 2, 8), []),
        (nn.MultiheadAttention(8, 2), torch.zeros(2, 2, 8), []),
        (nn.MultiheadAttention(8, 2), torch.zeros(2, 8), []),
        (nn.MultiheadAttention(8, 2, batch_first=True), torch.zeros(2, 6, 8), []),
    ],
)
def test_layers_that_go_along_the_samples_are_seen(module, given, expected):
    model = nn.ModuleList([module])
    with watch_sequence_axes(model, {2, 3}) as found:
        model[0](given, given, given) if isinstance(module, nn.MultiheadAttention) else model[0](given)
    assert found == expected
    assert not module._forward_pre_hooks


@pytest.mark.parametrize(
    ("batch", "name", "setting"),
    [
        ({"x": X, "lengths": [3, 8, 2, 2, 5]}, "'lengths' of the batch is a list", "{'lengths': 'list'}"),
        ((X, (0.5, 1, 2, 3, None)), "1 of the batch is a tuple", "[0, 'list']"),
        ({"x": X, "names": tuple("abcde")}, "'names' of the batch is a tuple", "{'names': 'list'}"),
    ],
    ids=["dict", "tuple", "texts"],
)
def test_a_list_with_a_number_for_each_sample_is_not_given_to_all(batch, name, setting):
    with pytest.raises(DataError) as error:
        check(batch)
    assert str(error.value).startswith(f"{name} of 5 values, as many as there are samples, but every micro-batch would")
    otherwise = setting.replace("'list'", "None")
    assert f"HybridParallelPlugin(batch_dims={setting}); if not, batch_dims={otherwise}." in str(error.value)
    check(batch, count=1)


def test_other_lists_go_to_every_micro_batch():
    check({"x": X, "size": [8, 16], "texts": list("abcde"), "pairs": [(1, 2)] * 5, "x2": [X, X]})
