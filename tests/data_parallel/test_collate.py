"""Batches of samples as tables have them: with lists of numbers."""

import re
from collections import namedtuple

import pytest
import torch
from torch.utils.data import default_collate

from hybridpp.data_parallel import stack_samples
from hybridpp.errors import DataError

Pair = namedtuple("Pair", ["x", "y"])  # as scripts write it
IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


@pytest.mark.parametrize(
    "samples",
    [
        [{"ids": [1, 2, 3], "label": 1}, {"ids": [4, 5, 6], "label": 0}],
        [([1, 2, 3], 1), ([4, 5, 6], 0)],
        [Pair([1, 2, 3], 1), Pair([4, 5, 6], 0)],
    ],
)
def test_lists_of_numbers_become_rows(samples):
    batch = stack_samples(samples)
    ids, label = batch.values() if isinstance(batch, dict) else batch
    assert torch.equal(ids, IDS)
    assert torch.equal(label, torch.tensor([1, 0]))
    assert isinstance(batch, Pair) == isinstance(samples[0], Pair)


@pytest.mark.parametrize(
    "sample",
    [(1.0, 2), [1, 2], {"size": (2, 3), "name": "a"}, {"words": ["a", "b"]}, torch.ones(2), {"x": torch.ones(2)}, 3],
)
def test_all_else_is_stacked_as_torch_does(sample):
    assert str(stack_samples([sample, sample])) == str(default_collate([sample, sample]))


def test_nested_lists_keep_their_dimensions_and_names_their_order():
    batch = stack_samples([{"a": [[1.5], [2]], "b": "x", "c": [True]}] * 3)
    assert list(batch) == ["a", "b", "c"]
    assert (batch["a"].shape, batch["a"].dtype, batch["c"].dtype) == ((3, 2, 1), torch.float32, torch.bool)


@pytest.mark.parametrize("lists", [([1, 2, 3], [4]), ([], [4, 5, 6, 7]), ([[1], [1, 2, 3]], [[1], [2]])])
def test_lists_of_unlike_lengths_are_refused_with_the_entrys_name(lists):
    with pytest.raises(DataError, match=re.escape("entry 'ids' has lists of") + r" [01] to [34] numbers\. Pad them"):
        stack_samples([{"ids": one} for one in lists])
