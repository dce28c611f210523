"""Collectives along the sequence, and their gradients, against the same sums in one process."""

import pytest
import torch
from support import on_ranks
from torch._subclasses.fake_tensor import FakeTensorMode

from hybridpp.cluster import Loopback, current_world
from hybridpp.sharded_activations.sequence_collectives import (
    copy_sequence,
    gather_sequence,
    own_shard,
    reduce_scatter_sequence,
    shard_lengths,
    shard_sequence,
)

CASES = [(4, 2), (5, 2), (7, 3), (65, 4), (2, 3)]  # places, ranks


def whole(length, requires_grad=False):
    x = torch.randn(2, length, 3, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
    return x.requires_grad_(requires_grad)


@pytest.mark.parametrize(("length", "size"), CASES)
def test_shards_differ_by_one_place_at_most(length, size):
    lengths = shard_lengths(length, size)
    assert sum(lengths) == length
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize(("length", "size"), CASES)
def test_shards_joined_are_the_whole_and_so_is_the_gradient(length, size):
    def run(group):
        x = whole(length, requires_grad=True)
        shard = shard_sequence(x, group)
        y = gather_sequence(shard * shard, length, group)
        assert torch.equal(y, x * x)
        # What follows is computed alike by all ranks.
        (y * whole(length)).sum().backward()
        torch.testing.assert_close(x.grad, 2 * x.detach() * whole(length))
        return tuple(shard.shape)

    assert on_ranks(size, run) == [(2, own, 3) for own in shard_lengths(length, size)]


def test_gradients_of_gradients_are_those_of_one_process():
    length, size = 5, 2
    weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def penalty(x, y):
        (slope,) = torch.autograd.grad(y.tanh().sum(), x, create_graph=True)
        return slope.square().sum()

    def run(group):
        x, own = whole(length, requires_grad=True), weight.chunk(size)[group.rank]
        shard = shard_sequence(x, group).exp()
        full = copy_sequence(shard, gather_sequence(shard, length, group), group, lambda: None)
        bias = torch.ones(3, dtype=torch.float64, requires_grad=True)
        # Columns and rows of two layers.
        y = reduce_scatter_sequence((full @ own.t()).sin() @ own, bias, group)
        return torch.autograd.grad(penalty(x, gather_sequence(y + shard, length, group)), [x, bias])

    x, bias = whole(length, requires_grad=True), torch.ones(3, dtype=torch.float64, requires_grad=True)
    y = x.exp()
    expected = torch.autograd.grad(penalty(x, (y @ weight.t()).sin() @ weight + bias + y), [x, bias])
    for found in on_ranks(size, run):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("length", "size"), CASES)
def test_gradients_of_a_copied_sequence_are_summed(length, size):
    def run(group):
        shard = own_shard(whole(length), group).requires_grad_()
        joined = gather_sequence(shard, length, group)
        said = []
        y = copy_sequence(shard, joined, group, lambda: said.append(True))
        assert torch.equal(y, whole(length))
        # Every rank makes something else of it.
        (y * y * (group.rank + 1)).sum().backward()
        total = size * (size + 1) / 2
        torch.testing.assert_close(shard.grad, 2 * total * own_shard(whole(length), group))
        return said

    assert on_ranks(size, run) == [[True]] * size


@pytest.mark.parametrize(("length", "size"), CASES)
def test_a_sum_kept_in_shards_has_whole_gradients(length, size):
    def run(group):
        x = (whole(length) * (group.rank + 1)).requires_grad_()
        bias = torch.ones(3, dtype=torch.float64, requires_grad=True)
        y = reduce_scatter_sequence(x, bias, group)
        torch.testing.assert_close(y, own_shard(whole(length) * size * (size + 1) / 2 + 1, group))
        weights = whole(length + 1)[:, 1:]
        (y * own_shard(weights, group)).sum().backward()
        assert torch.equal(x.grad, weights)
        torch.testing.assert_close(bias.grad, weights.sum((0, 1)))
        y += 1  # no view of anything: what a block adds in place may be added

    on_ranks(size, run)


def test_fake_tensors_are_not_communicated():
    def run(group):
        with FakeTensorMode():
            x = torch.ones(2, 5, 4, requires_grad=True)
            shard = shard_sequence(x, group)
            return [
                tuple(y.shape)
                for y in (shard, gather_sequence(shard, 5, group), reduce_scatter_sequence(x, None, group))
            ]

    # Only this rank takes part; a collective would wait for the other.
    first = Loopback(2).run(lambda: run(current_world().split([[0, 1]])) if current_world().rank == 0 else None)[0]
    assert first == [(2, 3, 4), (2, 5, 4), (2, 3, 4)]
