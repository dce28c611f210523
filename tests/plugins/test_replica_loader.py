"""A loader goes on where the loop was: each sample once, whatever batch size, replicas and workers come after."""

import random
import re

import numpy
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from hybridpp import HybridParallelPlugin
from hybridpp.cluster import Loopback
from hybridpp.errors import CheckpointError

NUM_SAMPLES = 23


class Numbers(Dataset):
    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return index, torch.randint(0, 2**40, ()).item()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(NUM_SAMPLES))


def loader_of(dataset=None, batch_size=2, num_workers=0, **options):
    context = {"multiprocessing_context": "fork"} if num_workers else {}
    dataset = Numbers() if dataset is None else dataset
    return HybridParallelPlugin().prepare_dataloader(
        dataset, batch_size=batch_size, num_workers=num_workers, collate_fn=list, **options, **context
    )


def take(loader, num_batches):
    """The samples of the first batches of a pass, and the iterator, of which one more batch is read ahead."""
    iterator = iter(loader)
    batches = [next(iterator) for _ in range(num_batches)]
    iterator.peek()
    return [sample for batch in batches for sample in batch], iterator


def rest(loader, num_passes=1):
    return [[sample for batch in loader for sample in batch] for _ in range(num_passes)]


@pytest.mark.covering("num_workers later_workers")
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("later_workers", [0, 1])
def test_another_batch_size_and_other_workers_go_on_at_the_next_sample(shuffle, num_workers, later_workers):
    options = {"shuffle": shuffle, "seed": 3}
    expected = rest(loader_of(**options), 3)
    loader = loader_of(num_workers=num_workers, **options)
    assert rest(loader) == expected[:1]
    first, iterator = take(loader, 4)
    position = loader.position()
    assert (position.epoch, position.samples) == (1, 8)
    list(iterator)  # so that its workers end
    resumed = loader_of(batch_size=3, num_workers=later_workers, **options)
    resumed.check_position(position)
    assert resumed.go_on(position) == len(resumed) - 5 == 3
    assert resumed.position()[:2] == (1, 8)
    second, third = rest(resumed, 2)
    assert [first + second, third] == expected[1:]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2)])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("make", [Numbers, Stream])
def test_other_replicas_go_on_at_the_next_sample(before, after, drop_last, make):
    options = {"drop_last": drop_last, "shuffle": make is Numbers}

    def first():
        loader = loader_of(make(), **options)
        seen, _ = take(loader, 2)
        return seen, loader.position()

    ranks = Loopback(before).run(first)
    seen, positions = [sample for each, _ in ranks for sample in each], {position for _, position in ranks}
    (position,) = positions

    def second():
        loader = loader_of(make(), **options)
        loader.go_on(position)
        return rest(loader)[0]

    later = [sample for each in Loopback(after).run(second) for sample in each]
    num_left = NUM_SAMPLES - len(seen)
    assert len(seen) == 4 * before
    expected = set(rest(loader_of(make(), shuffle=options["shuffle"]))[0])
    assert len({*seen, *later}) == len(seen) + num_left - (num_left % (2 * after) if drop_last else 0)
    assert {*seen, *later} <= expected


class Augmented(Numbers):
    def __getitem__(self, index):
        return index, random.random(), numpy.random.rand(), torch.rand(()).item()


def generator_states():
    return random.getstate(), tuple(numpy.random.get_state()[1]), tuple(torch.get_rng_state().tolist())


@pytest.mark.covering
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 2)])
def test_augmentation_goes_on_in_mid_epoch_as_in_one_run_of_one_rank(num_workers, before, after):
    """Python's, numpy's and torch's draws, in the second epoch; the generators of the script do not move."""
    options = {"shuffle": True, "seed_samples": True}
    first_epoch, expected = rest(loader_of(Augmented(), batch_size=3, **options), 2)
    assert {sample[0]: sample[1:] for sample in first_epoch} != {sample[0]: sample[1:] for sample in expected}

    def first():
        loader = loader_of(Augmented(), num_workers=num_workers, **options)
        list(loader)
        taken, iterator = take(loader, 2)
        position = loader.position()
        list(iterator)
        return taken, position

    def second():
        loader = loader_of(Augmented(), batch_size=3, num_workers=2 - num_workers, **options)
        loader.go_on(position)
        return rest(loader)[0]

    states = generator_states()
    ranks = Loopback(before).run(first)
    position = ranks[0][1]
    seen = [sample for taken, _ in ranks for sample in taken]
    seen += [sample for rank in Loopback(after).run(second) for sample in rank]
    assert generator_states() == states
    assert set(seen) == set(expected), "a last batch of one sample is filled up with another"


def test_the_end_of_an_epoch_is_the_start_of_the_next():
    loader = loader_of(shuffle=True)
    assert loader.position()[:2] == (0, 0)
    iterator = iter(loader)
    assert loader.position()[:2] == (0, 0)
    for _ in range(len(loader)):
        next(iterator)
    assert loader.position()[:2] == (1, 0)
    assert next(iterator, None) is None
    assert loader.position()[:2] == (1, 0)
    resumed = loader_of(shuffle=True)
    assert resumed.go_on(loader.position()) == 0
    assert rest(resumed) == rest(loader)


def test_a_position_is_reached_twice_in_a_row():
    expected = rest(loader_of(shuffle=True))[0]
    first, _ = take(loader := loader_of(shuffle=True), 3)
    again = loader_of(shuffle=True)
    again.go_on(loader.position())
    second, _ = take(again, 2)
    last = loader_of(shuffle=True)
    last.go_on(again.position())
    assert first + second + rest(last)[0] == expected


def test_set_epoch_before_the_pass_that_goes_on_keeps_its_position():
    """As scripts call it at the start of every epoch."""
    loader = loader_of(shuffle=True)
    loader.go_on(take(first := loader_of(shuffle=True), 3)[1] and first.position())
    loader.batch_sampler.set_epoch(0)
    assert len(rest(loader)[0]) == NUM_SAMPLES - 6
    loader.go_on(first.position())
    loader.batch_sampler.set_epoch(5)
    assert len(rest(loader)[0]) == NUM_SAMPLES


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_goes_on_and_counts_its_passes(num_workers):
    loader = loader_of(Stream(), num_workers=num_workers)
    rest(loader)
    _, iterator = take(loader, 3)
    position = loader.position()
    list(iterator)
    assert position[:2] == (1, 6)
    resumed = loader_of(Stream(), num_workers=num_workers)
    assert resumed.go_on(position) == 3
    assert rest(resumed, 2) == [list(range(6, NUM_SAMPLES)), list(range(NUM_SAMPLES))]
    assert resumed.position()[0] == 2


def test_seeds_of_workers_go_on_without_seeds_of_samples():
    def passes(loader, count):
        return [[number for _, number in part] for part in rest(loader, count)]

    options = {"num_workers": 1, "seed_samples": False}
    whole = loader_of(**options)
    expected = passes(whole, 3)
    loader = loader_of(**options)
    passes(loader, 2)
    resumed = loader_of(**options)
    resumed.go_on(loader.position())
    assert passes(resumed, 1) == expected[2:]


def test_the_middle_of_an_epoch_of_other_data_is_refused():
    loader = loader_of(shuffle=True, seed=1)
    take(loader, 1)
    position = loader.position()
    text = "23 samples, shuffled with seed 1, and here are 23 samples, not shuffled. Use the same dataset"
    with pytest.raises(CheckpointError, match=re.escape(text)):
        loader_of().check_position(position)
    with pytest.raises(CheckpointError, match="and here are 5 samples, shuffled with seed 1"):
        loader_of(list(range(5)), shuffle=True, seed=1).check_position(position)
    rest(loader)
    loader_of().check_position(loader.position())
