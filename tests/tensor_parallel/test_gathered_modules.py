"""Whole modules between divided layers, against the same in one process."""

import copy

import pytest
import torch
from support import on_ranks
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hybridpp.cluster import Loopback, current_world
from hybridpp.module_adapter import ModuleAdapter
from hybridpp.sharding_plan.sharding_spec import DimShard
from hybridpp.tensor_parallel.gathered_modules import gather_parts, run_on_gathered
from hybridpp.tensor_parallel.tp_context import TensorParallelContext

WIDTH = 8
PARTS = {
    "plain": (2, DimShard(-1, (WIDTH,))),
    "fused": (2, DimShard(-1, (6, 2))),
    "shared by two": (4, DimShard(-1, (WIDTH,), (2,))),
}


class Gated(nn.Module):
    """A norm over the width of what comes out of a gate; beside it a number that is no activation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        nn.init.normal_(self.norm.weight)

    def forward(self, x, gate, scale):
        return self.norm(x * gate) * scale, scale


@pytest.mark.parametrize(("size", "part"), PARTS.values(), ids=PARTS)
def test_each_rank_gets_its_shard_of_the_output_and_of_its_gradient(size, part):
    torch.manual_seed(0)
    module, scale = Gated(), torch.tensor(2.0)
    x, gate, weights = torch.randn(3, 2, 5, WIDTH, dtype=torch.float64)
    x.requires_grad_()
    expected = module(x, gate, scale)[0]
    (expected * weights).sum().backward()

    def run(group):
        own = x.detach()[..., part.index(group.rank, size, WIDTH)].requires_grad_()
        mine = copy.deepcopy(module)
        mine.zero_grad()
        run_on_gathered(ModuleAdapter(mine), mine, part, TensorParallelContext(group))
        y, same = mine(own, part.select(gate, group.rank, size), scale=scale)
        assert same is scale
        # Of what ranks share each has a share of the gradient, as of a divided layer's output.
        share = 1 / max(part.copies, default=1)
        (y * part.select(weights, group.rank, size) * share).sum().backward()
        return y.detach(), own.grad / share, mine.norm.weight.grad

    ranks = on_ranks(size, run)
    for rank, (y, gradient, _) in enumerate(ranks):
        torch.testing.assert_close(y, part.select(expected.detach(), rank, size))
        torch.testing.assert_close(gradient, part.select(x.grad, rank, size))
    torch.testing.assert_close(sum(one for *_, one in ranks), module.norm.weight.grad)


def test_fake_parts_are_not_communicated():
    def run(group):
        with FakeTensorMode():
            return tuple(gather_parts(torch.ones(2, 4, requires_grad=True), DimShard(-1, (WIDTH,)), group).shape)

    # Only this rank takes part; a collective would wait for the other.
    assert Loopback(2).run(lambda: run(current_world().split([[0, 1]])) if current_world().rank == 0 else None)[0] == (
        2,
        8,
    )
