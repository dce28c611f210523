"""A plan holds for all that a block is shown to do: with the arguments of each sample, and beyond limits on numbers."""

import pytest
import torch
from attention_blocks import WIDTH, Attention, Block, Gated, infer
from hybridpp_plugins.find_tp_plan import find_tp_plan
from hybridpp_plugins.sample import Samples
from torch import nn

from hybridpp.cluster import current_world
from hybridpp.plan_search import block_run
from hybridpp.plan_search.model_search import infer_plan


class Limited(nn.Module):
    """Has a limit on what is between its layers, which numbers like those of an untrained model do not reach."""

    def __init__(self, limit):
        super().__init__()
        self.up, self.down, self.limit = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), limit

    def forward(self, x):
        return self.down(self.limit(self.up(x).relu()))


def of_a_place(h):
    return h * (100 / h.norm(dim=-1, keepdim=True).clamp(min=100))


def of_all(h):
    return h.clamp(max=100) / (h.amax() / 100).clamp(min=1)


def if_large(h):
    return h.softmax(-1) if h.abs().max() > 100 else h


def of_outliers(limit):
    def dropped(h):
        return h * (h.abs() < limit).all(-1, keepdim=True)

    return dropped


def of_a_budget(h):
    return h / (h.abs().sum(-1, keepdim=True) / 60).clamp(min=1)


def of_each(h):
    return h.clamp(max=100)


def sharded(plan):
    return {name.rpartition(".")[2] for name in plan.styles}


@pytest.mark.parametrize("limit", [of_a_place, of_all, if_large, of_outliers(4), of_outliers(50), of_a_budget])
def test_layers_with_a_limit_on_all_features_between_them_stay_whole(limit):
    assert not sharded(infer(Limited(limit)))


@pytest.mark.parametrize("tp_size", [2, 4])
def test_layers_with_a_limit_on_each_feature_between_them_are_sharded(tp_size):
    block = Block(attention=Attention(), mlp=Gated(), limited=Limited(of_each))
    assert sharded(infer(block, tp_size)) >= {"gate", "up", "down"}


class Growing(nn.Module):
    """Has no finite numbers for large weights."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x):
        return self.down(self.up(x).exp())


def test_blocks_that_have_no_finite_numbers_for_large_weights_are_sharded():
    assert sharded(infer(Growing())) == {"up", "down"}


def test_weights_are_what_they_were_behind_a_trial_with_large_ones():
    block = Limited(of_each)
    reference = block_run.randomized_copy(block, [((torch.randn(3, WIDTH),), {})])
    before = [held.clone() for held in reference.block.parameters()]
    seen = [max(held.abs().max().item() for held in way.block.parameters()) for way in reference.other_ways()]
    assert seen[-1] > 2 * max(held.abs().max() for held in before)
    assert all(map(torch.equal, before, reference.block.parameters()))


class Conditioned(nn.Module):
    """Does something with all features between its layers where it is given something to do it with."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x, scale=None, *, is_normalised=False):
        h = self.up(x).relu()
        if scale is not None:
            h = h * scale / h.norm(dim=-1, keepdim=True)
        return self.down(h.softmax(-1) if is_normalised else h)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Conditioned() for _ in range(2))

    def forward(self, x, scale=None, is_normalised=False):
        for block in self.blocks:
            x = block(x, scale, is_normalised=is_normalised)
        return x


PLAIN = {"x": torch.randn(2, 3, WIDTH)}


@pytest.mark.parametrize("more", [{"scale": torch.ones(2, 1, 1)}, {"is_normalised": True}])
@pytest.mark.parametrize("is_first", [True, False])
def test_blocks_are_tried_with_what_each_kind_of_sample_gives_them(more, is_first):
    first, second = (PLAIN | more, PLAIN) if is_first else (PLAIN, PLAIN | more)

    def styles(*kinds):
        samples = Samples((kinds[0],), tuple((one,) for one in kinds[1:]))
        return sharded(find_tp_plan(Net(), lambda: samples, 2, current_world().control()))

    assert styles(PLAIN, {"x": torch.randn(1, 4, WIDTH)}) == {"up", "down"}
    assert not styles(first, second)


def test_arguments_that_a_block_does_not_run_with_are_left_out():
    calls = {"0": ((torch.randn(2, WIDTH),), {})}
    more = {"0": [None, ((torch.randn(2, WIDTH),), {"unknown": 1})]}
    assert sharded(infer_plan(nn.Sequential(Conditioned()), ["0"], calls, 2, more)) == {"up", "down"}
