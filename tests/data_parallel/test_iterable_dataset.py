"""Streams that replicas share, and random numbers by sample."""

import pickle
import random
from itertools import product

import numpy
import pytest
import torch
from covering import one_test_for
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hybridpp.data_parallel import SeededCollate, SeededDataset, ShardedBatchSampler, ShardedIterableDataset
from hybridpp.errors import ConfigError


class Counting(IterableDataset):
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


def parts(size, batch_size, num_replicas, **options):
    """By replica, its batches."""
    return [
        list(
            ShardedIterableDataset(
                Counting(size), batch_size=batch_size, num_replicas=num_replicas, replica=replica, **options
            )
        )
        for replica in range(num_replicas)
    ]


@one_test_for("size, drop_last, num_replicas", product(range(1, 14), [False, True], [1, 2, 3]))
def test_a_stream_is_shared_out_like_a_dataset_with_indices(size, drop_last, num_replicas):
    if drop_last and size < 2 * num_replicas:
        assert parts(size, 2, num_replicas, drop_last=True) == [[]] * num_replicas
        return
    expected = [
        list(
            ShardedBatchSampler(
                num_samples=size, batch_size=2, num_replicas=num_replicas, replica=replica, drop_last=drop_last
            )
        )
        for replica in range(num_replicas)
    ]
    assert parts(size, 2, num_replicas, drop_last=drop_last) == expected


def test_wrong_sizes_of_a_stream():
    with pytest.raises(ConfigError, match="batch_size must be at least 1"):
        ShardedIterableDataset(Counting(3), batch_size=0, num_replicas=1, replica=0)


def draw():
    return round(random.random() + numpy.random.rand() * 10 + torch.rand(()).item() * 100, 6)


class Noisy(Dataset):
    """Draws from every generator; says what it is asked for in bulk."""

    classes = ("cat", "dog")

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return index, draw()

    def __getitems__(self, indices):
        raise AssertionError("random numbers of one sample would follow those of another")


def epochs(batch_size, num_replicas=1, replica=0, num_workers=0, seed=7, collate=None, **options):
    """In two epochs, what each sample drew, by index."""
    sampler = ShardedBatchSampler(
        num_samples=12, batch_size=batch_size, num_replicas=num_replicas, replica=replica, shuffle=True
    )
    loader = DataLoader(
        SeededDataset(Noisy(), seed),
        batch_sampler=sampler,
        collate_fn=SeededCollate(collate or list),
        num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,
        **options,
    )
    return [[sample for batch in loader for sample in batch] for _ in range(2)]


def test_samples_draw_the_same_on_any_number_of_workers_and_replicas():
    expected = epochs(4)
    assert dict(expected[0]) != dict(expected[1])
    assert epochs(4, num_workers=2, worker_init_fn=lambda worker: random.seed(worker)) == expected
    two = [epochs(2, num_replicas=2, replica=replica) for replica in range(2)]
    for epoch in range(2):
        assert dict(two[0][epoch]) | dict(two[1][epoch]) == dict(expected[epoch])
    assert epochs(4, seed=8) != expected


def test_a_collate_that_draws_does_so_by_batch():
    def collate(samples):
        return [draw()]

    expected = epochs(4, collate=collate)
    assert epochs(4, collate=collate, num_workers=2) == expected
    assert len({number for epoch in expected for number in epoch}) == 6
    assert epochs(2, num_replicas=2, replica=1, collate=collate)[0] != expected[0]


def test_the_scripts_own_generators_are_left_alone():
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    # A loader without a generator of its own takes a seed from torch's.
    epochs(4, collate=lambda samples: [draw()], generator=torch.Generator())
    assert (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


class Own:
    def __init__(self):
        self.file = None

    def __len__(self):
        return 2

    def __getitem__(self, index):
        if index > 1:
            raise IndexError(index)
        return self.file, index


def test_the_wrapped_dataset_is_the_dataset_for_whoever_asks_or_sets():
    own = Own()
    seeded = SeededDataset(own, 0)
    seeded.file = "open"
    assert own.file == seeded.file == "open"
    assert seeded[1] == ("open", 1)
    assert list(seeded.__getitems__([0, 1])) == [("open", 0), ("open", 1)]
    assert len(seeded) == 2
    assert SeededDataset(Noisy(), 0).classes == ("cat", "dog")
    del seeded.file
    assert not hasattr(seeded, "file")
    assert len(pickle.loads(pickle.dumps(SeededDataset(Noisy(), 3)))) == 12
