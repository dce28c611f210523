"""Collectives and the gradients that flow back through them, against the same sums in one process."""

import torch
from support import on_ranks
from torch._subclasses.fake_tensor import FakeTensorMode

from hybridpp.cluster import Loopback, current_world
from hybridpp.sharded_activations.collectives import copy_to_ranks, gather_from_ranks, scatter_to_ranks, sum_over_ranks


def test_gradients_of_a_copied_activation_are_summed():
    def run(group):
        x = torch.ones(2, requires_grad=True)
        said = []
        y = copy_to_ranks(x, group, lambda: said.append(group.rank))
        (y * (group.rank + 1.0)).sum().backward()
        return y.tolist(), x.grad.tolist(), said

    assert on_ranks(3, run) == [([1, 1], [6, 6], [rank]) for rank in range(3)]


def test_gradients_of_gradients_are_those_of_one_process():
    weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    start = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3)

    def penalty(x, y, z):
        (slope,) = torch.autograd.grad(y.tanh().sum() + z.square().sum(), x, create_graph=True)
        return slope.square().sum()

    def run(group):
        x, own = start.clone().requires_grad_(), weight.chunk(2)[group.rank]
        columns = (copy_to_ranks(x, group) @ own.t()).sin()
        y, z = sum_over_ranks(columns @ own, group), gather_from_ranks(columns.exp(), group, 4)
        again = gather_from_ranks(scatter_to_ranks(z, group, 2).cos(), group, 4)
        return torch.autograd.grad(penalty(x, y, again), x)

    x = start.clone().requires_grad_()
    columns = (x @ weight.t()).sin()
    expected = torch.autograd.grad(penalty(x, columns @ weight, columns.exp().cos()), x)
    for found in on_ranks(2, run):
        torch.testing.assert_close(found, expected)


def test_a_copied_activation_without_gradient_is_itself():
    def run(group):
        constant, leaf = torch.ones(1), torch.ones(1, requires_grad=True)
        with torch.no_grad():
            return copy_to_ranks(constant, group) is constant and copy_to_ranks(leaf, group) is leaf

    assert on_ranks(1, run) == [True]


def test_summands_are_summed_and_get_the_gradient_of_the_sum():
    def run(group):
        x = torch.full((2, 2), group.rank + 1.0, requires_grad=True)
        y = sum_over_ranks(x * 2, group)
        (y * y).sum().backward()
        return y[0, 0].item(), x.grad[0, 0].item()

    assert on_ranks(2, run) == [(6, 24), (6, 24)]


def test_parts_are_gathered_and_get_their_part_of_the_gradient():
    weights = torch.tensor([1.0, 2.0, 3.0])

    def run(group):
        x = torch.tensor([[10.0, 20.0]]) + group.rank
        x.requires_grad_()
        y = gather_from_ranks(x, group, width=3)
        (y * weights).sum().backward()
        return y.tolist(), x.grad.tolist()

    whole = [[10, 20, 11]]
    assert on_ranks(2, run) == [(whole, [[1, 2]]), (whole, [[3, 0]])]


def test_fake_tensors_are_not_communicated():
    def run(group):
        with FakeTensorMode():
            x = torch.ones(2, 4, requires_grad=True)
            shapes = sum_over_ranks(x, group).shape, gather_from_ranks(x, group, 7).shape
        return [tuple(shape) for shape in shapes]

    # Only this rank takes part; a collective would wait for the other.
    first = Loopback(2).run(lambda: run(current_world().split([[0, 1]])) if current_world().rank == 0 else None)[0]
    assert first == [(2, 4), (2, 7)]
