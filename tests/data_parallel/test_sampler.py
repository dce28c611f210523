import re
from itertools import chain
from textwrap import dedent

import pytest
import torch
from covering import one_test_for

from hybridpp.data_parallel.sampler import ShardedBatchSampler
from hybridpp.errors import ConfigError, DataError

SIZES = [(n, b, r) for n in (1, 2, 7, 16, 33) for b in (1, 3, 4) for r in (1, 2, 3, 5)]


def samplers(num_samples, batch_size, num_replicas, **options):
    return [
        ShardedBatchSampler(
            num_samples=num_samples, batch_size=batch_size, num_replicas=num_replicas, replica=replica, **options
        )
        for replica in range(num_replicas)
    ]


def global_batches(num_samples, batch_size, num_replicas, **options):
    """The samples of each step, the replicas' slices side by side."""
    epochs = [list(sampler) for sampler in samplers(num_samples, batch_size, num_replicas, **options)]
    return [[sample for batch in step for sample in batch] for step in zip(*epochs, strict=True)]


def picture(replicas):
    lines = (
        f"replica {replica} | " + " | ".join(" ".join(map(str, batch)) for batch in sampler)
        for replica, sampler in enumerate(replicas)
    )
    return "\n".join(lines) + "\n"


def test_ten_samples_on_two_replicas():
    assert picture(samplers(10, batch_size=2, num_replicas=2)) == dedent("""\
        replica 0 | 0 1 | 4 5 | 8
        replica 1 | 2 3 | 6 7 | 9
    """)


def test_last_global_batch_gives_the_first_replicas_one_more():
    assert picture(samplers(17, batch_size=3, num_replicas=4)) == dedent("""\
        replica 0 | 0 1 2 | 12 13
        replica 1 | 3 4 5 | 14
        replica 2 | 6 7 8 | 15
        replica 3 | 9 10 11 | 16
    """)


def test_a_short_last_global_batch_is_filled_with_the_first_samples():
    assert picture(samplers(8, batch_size=2, num_replicas=3)) == dedent("""\
        replica 0 | 0 1 | 6
        replica 1 | 2 3 | 7
        replica 2 | 4 5 | 0
    """)


def test_a_dataset_smaller_than_half_the_replicas_is_repeated():
    assert picture(samplers(2, batch_size=2, num_replicas=5)) == dedent("""\
        replica 0 | 0
        replica 1 | 1
        replica 2 | 0
        replica 3 | 1
        replica 4 | 0
    """)


@pytest.mark.covering("n b", "n r", "b r")
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("n", "b", "r"), SIZES)
def test_every_sample_comes_once_an_epoch_but_for_the_fill(n, b, r, shuffle):
    seen = list(chain.from_iterable(global_batches(n, b, r, shuffle=shuffle)))
    num_last = n % (b * r)
    num_fill = r - num_last if 0 < num_last < r else 0
    assert sorted(seen[:n]) == list(range(n))
    assert len(seen) == n + num_fill
    assert all(sample == seen[index % n] for index, sample in enumerate(seen[n:]))


@pytest.mark.covering("n b", "n r", "b r")
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("n", "b", "r"), SIZES)
def test_steps_are_those_of_one_replica_with_the_whole_batch(n, b, r, shuffle):
    one = global_batches(n, b * r, 1, shuffle=shuffle, seed=3)
    many = global_batches(n, b, r, shuffle=shuffle, seed=3)
    assert len(many) == len(one)
    assert all(split[: len(whole)] == whole for split, whole in zip(many, one, strict=True))


@one_test_for(
    ("n", "b", "r", "drop_last"),
    [(*size, False) for size in SIZES] + [(n, b, r, True) for n, b, r in SIZES if n >= b * r],
)
def test_sizes_differ_by_at_most_one_and_no_replica_is_left_without_work(n, b, r, drop_last):
    replicas = samplers(n, b, r, drop_last=drop_last)
    sizes = [[len(batch) for batch in sampler] for sampler in replicas]
    assert {len(row) for row in sizes} == {len(sampler) for sampler in replicas} == {len(replicas[0])}
    for step in zip(*sizes, strict=True):
        assert 1 <= min(step) <= max(step) <= min(b, min(step) + 1)
        assert list(step) == sorted(step, reverse=True)
    assert all(size == b for row in sizes for size in (row if drop_last else row[:-1]))


def test_drop_last_leaves_only_the_incomplete_global_batch_out():
    assert global_batches(11, 2, 2, drop_last=True) == global_batches(11, 2, 2)[:2]
    assert global_batches(12, 2, 2, drop_last=True) == global_batches(12, 2, 2)


def test_each_pass_is_the_next_epoch_and_reshuffles():
    (sampler,) = samplers(50, 5, 1, shuffle=True)
    passes = [list(sampler) for _ in range(3)]
    assert sampler.epoch == 3
    assert len({str(batches) for batches in passes}) == 3
    for epoch, batches in enumerate(passes):
        sampler.set_epoch(epoch)
        assert sampler.epoch == epoch
        assert list(sampler) == batches


def test_order_is_a_function_of_seed_and_epoch_only():
    torch.manual_seed(1)
    first = global_batches(50, 5, 2, shuffle=True, seed=7)
    torch.manual_seed(2)
    assert global_batches(50, 5, 2, shuffle=True, seed=7) == first
    assert global_batches(50, 5, 2, shuffle=True, seed=8) != first


def test_iterating_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    global_batches(50, 5, 2, shuffle=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_next_seed_is_not_the_next_epoch():
    (sampler,) = samplers(50, 5, 1, shuffle=True, seed=0)
    sampler.set_epoch(1)
    assert list(sampler) != global_batches(50, 5, 1, shuffle=True, seed=1)


def test_without_shuffle_every_epoch_is_the_dataset_in_order():
    (sampler,) = samplers(5, 2, 1)
    assert list(sampler) == list(sampler) == [[0, 1], [2, 3], [4]]


def test_an_iterator_that_is_never_used_takes_no_epoch():
    (sampler,) = samplers(50, 5, 1, shuffle=True)
    iter(sampler)
    assert sampler.epoch == 0
    assert next(iter(sampler)) == global_batches(50, 5, 1, shuffle=True)[0]
    assert sampler.epoch == 1


def test_set_epoch_during_a_pass_changes_the_next_one_only():
    (sampler,) = samplers(50, 5, 1, shuffle=True)
    expected = global_batches(50, 5, 1, shuffle=True)
    batches = iter(sampler)
    start = [next(batches)]
    sampler.set_epoch(4)
    assert start + list(batches) == expected
    assert sampler.epoch == 4


def test_works_as_batch_sampler_of_a_dataloader():
    _, sampler = samplers(10, 2, 2)
    loader = torch.utils.data.DataLoader(torch.arange(100, 110), batch_sampler=sampler)
    assert len(loader) == 3
    assert [batch.tolist() for batch in loader] == [[102, 103], [106, 107], [109]]
    assert sampler.epoch == 1


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"batch_size": 0},
            ConfigError,
            "batch_size must be at least 1: got batch_size=0. Use the number of samples per replica and step.",
        ),
        (
            {"num_replicas": 0},
            ConfigError,
            "num_replicas must be at least 1: got num_replicas=0. Use 1 without data parallelism.",
        ),
        (
            {"replica": 2},
            ConfigError,
            "replica must be between 0 and num_replicas - 1: got replica=2, num_replicas=2. "
            "Use this process's rank in its data-parallel group.",
        ),
        (
            {"replica": -1},
            ConfigError,
            "replica must be between 0 and num_replicas - 1: got replica=-1, num_replicas=2.",
        ),
        (
            {"num_samples": 0},
            DataError,
            "dataset must hold at least 1 sample: got num_samples=0. Check its path, split and filters.",
        ),
        (
            {"num_samples": 7, "drop_last": True},
            DataError,
            "drop_last needs at least one complete global batch: got num_samples=7, batch_size=4, num_replicas=2 "
            "(8 samples per step), so an epoch would have no step. Use drop_last=False or a smaller batch_size.",
        ),
    ],
)
def test_refuses_what_would_give_no_batches(change, error, message):
    arguments = {"num_samples": 20, "batch_size": 4, "num_replicas": 2, "replica": 0}
    with pytest.raises(error, match=re.escape(message)):
        ShardedBatchSampler(**(arguments | change))


def test_refuses_a_negative_epoch():
    (sampler,) = samplers(4, 2, 1)
    with pytest.raises(ConfigError, match=re.escape("epoch must not be negative: got epoch=-1. Count epochs from 0.")):
        sampler.set_epoch(-1)
