"""Large collectives over gloo go from rank to rank, and add in rank order."""

import time
from functools import partial

import pytest
import torch
from plugins.zero_models import SAMPLE, TiedModel, batches, cross_entropy, step, two_groups, weights_of
from processes import run_ranks
from support import assert_same

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import current_world, torch_group
from hybridpp.cluster.direct_exchange import add_into_own, received_beside
from hybridpp.cluster.shared_memory import sum_in_order


def summands(size, number=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(size)
    return [torch.randn(number, generator=generator).to(dtype) for _ in range(size)]


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_every_rank_adds_in_rank_order_into_its_own_summand(size):
    expected = sum_in_order(summands(size, 1000))
    for rank in range(size):
        parts = summands(size, 1000)
        total = add_into_own(parts, rank)
        assert total is parts[rank]
        assert torch.equal(total, expected)


def test_the_sum_of_one_rank_is_its_summand():
    own = torch.ones(3)
    assert add_into_own(received_beside(own, 0, 1), 0).tolist() == [1.0] * 3


_DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.complex64)


def _large(num_ranks=3):
    """Collectives that are too large for shared memory, several under way at once."""
    group = current_world().split([list(range(num_ranks))])
    group._exchanging = lambda num_bytes: None
    found = []
    flats = [summands(num_ranks, 4 * num_ranks, dtype)[group.rank] for dtype in _DTYPES]
    for work in [group.reduce_scatter_segments(flat) for flat in flats]:
        work.wait()
    found.append([flat.clone() for flat in flats])
    for work in [group.all_gather_segments(flat) for flat in flats]:
        work.wait()
    found.append(flats)
    started = [
        group.start_reduce_scatter(summands(num_ranks, 4 * num_ranks, dtype)[group.rank], 0) for dtype in _DTYPES
    ]
    found.append([pending.wait() for pending in started])
    return found


def test_large_collectives_give_every_rank_the_same_bits():
    for rank, (scattered, whole, shards) in enumerate(run_ranks(_large, 3)):
        for dtype, flat, gathered, shard in zip(_DTYPES, scattered, whole, shards, strict=True):
            parts = summands(3, 12, dtype)
            expected, kept = sum_in_order(parts), parts[rank].clone()
            kept[4 * rank : 4 * rank + 4] = expected[4 * rank : 4 * rank + 4]
            assert torch.equal(flat, kept), "other segments are as they were"
            assert torch.equal(gathered, expected)
            assert torch.equal(shard, expected[4 * rank : 4 * rank + 4])


def _many():
    """How much memory sums that nobody has waited for hold, and what they come to."""
    group = current_world().split([[0, 1]])
    group._exchanging = lambda num_bytes: None
    flats = [torch.full((2000,), float(number)) for number in range(10)]
    works = [group.reduce_scatter_segments(flat) for flat in flats]
    running = sum(work._pending is not None for work in works)
    for work in works[::-1]:
        work.wait()
        work.wait()
    own = slice(1000 * group.rank, 1000 * (group.rank + 1))
    return running, [set(flat[own].tolist()) for flat in flats], sum(work._pending is not None for work in works)


def test_few_of_many_sums_hold_memory_at_a_time():
    for running, sums, left in run_ranks(_many, 2):
        assert (running, left) == (4, 0)
        assert sums == [{2.0 * number} for number in range(10)]


def _trained(zero_stage):
    """Weights after steps in which no bucket goes through shared memory; several sums are under way."""
    torch_group._MAX_EXCHANGED_BYTES = 0
    plugin = HybridParallelPlugin(num_microbatches=2, max_norm=0.5, zero_stage=zero_stage, ddp_bucket_cap_mb=0.01)
    booster, model = Booster(plugin=plugin), TiedModel()
    parts = booster.boost(model, two_groups(model.parameters()), criterion=cross_entropy, sample=SAMPLE)
    for batch in batches(3, 8):
        step(booster, parts.model, parts.optimizer, batch)
        parts.optimizer.step()
    assert len(plugin._engine(parts.model).weights.layout.buckets) > 5
    return weights_of(parts.model)


def test_a_divided_update_over_gloo_has_the_bits_of_one_that_is_not():
    plain, zero = (run_ranks(partial(_trained, stage), 2) for stage in (0, 1))
    for expected, actual in zip(plain, zero, strict=True):
        assert_same(actual, expected)


def _alone():
    group = current_world().split([[0]])
    group._exchanging = lambda num_bytes: None
    flat = torch.arange(4.0)
    group.reduce_scatter_segments(flat).wait()
    group.all_gather_segments(flat).wait()
    return flat.tolist()


def test_one_rank_keeps_what_it_has():
    assert run_ranks(_alone, 1) == [[0.0, 1.0, 2.0, 3.0]]


def test_an_exchange_that_nobody_waits_for_takes_its_messages(monkeypatch):
    """As where a batch was read ahead by an iterator that is gone: the next exchange gets its own."""
    monkeypatch.setenv("HYBRIDPP_SHARED_MEMORY", "0")

    def run():
        group = current_world().control()
        if group.rank:
            time.sleep(0.3)  # so that the first exchange of rank 0 is gone before its messages come
        group.start_all_gather(torch.tensor([1.0 + group.rank]))
        found = [torch.cat(group.all_gather(torch.tensor([10.0 * n + group.rank]))).tolist() for n in (1, 2)]
        return found, len(group._exchanges)

    assert run_ranks(run, 2, timeout_s=30, wait_s=10) == [([[10.0, 11.0], [20.0, 21.0]], 0)] * 2
