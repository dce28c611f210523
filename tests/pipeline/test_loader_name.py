"""Names of what batches are read from."""

import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from hybridpp.pipeline.loader_name import loader_name
from hybridpp.pipeline.read_ahead import ReadAheadIterator


def batches():
    yield 1


def test_loaders_generators_and_iterators_are_named():
    dataset = Subset(TensorDataset(torch.zeros(4)), [0, 1])
    assert loader_name(ReadAheadIterator(iter(DataLoader(dataset)))) == "a DataLoader of Subset of TensorDataset"
    assert loader_name(batches()).startswith("the generator batches (")
    assert loader_name(iter([1])) == "an iterator of class list_iterator"
