"""A plan holds in training, too, where blocks do what they do not do in evaluation."""

import pytest
import torch
from attention_blocks import WIDTH, Attention, Block, Gated, infer
from torch import nn
from torch.nn import functional

from hybridpp.plan_search import block_run
from hybridpp.plan_search.model_search import infer_plan


class ClippedInTraining(nn.Module):
    """Uses a clipped weight while it is trained: that of the first layer, or of the second."""

    def __init__(self, clipped):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.clipped = clipped

    def forward(self, x):
        return self.layer("down", self.layer("up", x).relu())

    def layer(self, name, x):
        layer = self.get_submodule(name)
        if self.training and name == self.clipped:
            return functional.linear(x, layer.weight.clamp(-0.1, 0.1), layer.bias)
        return layer(x)


class Flagged(ClippedInTraining):
    """Does that where it is told to."""

    def forward(self, x, is_trained=False):
        h = self.up(x).relu()
        return functional.linear(h, self.down.weight, self.down.bias) if is_trained else self.down(h)


class ClampedInPlace(nn.Module):
    """Bounds its weights where they are, before it is trained on them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x):
        if self.training:
            self.down.weight.data.clamp_(-0.1, 0.1)
        return self.down(self.up(x).relu())


class Noisy(nn.Module):
    """Drops and draws in training, as stochastic depth does."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Dropout(0.5)

    def forward(self, x):
        h = self.dropout(self.up(x).relu())
        if self.training:
            h = h * torch.empty_like(h).bernoulli_(0.5) + torch.rand_like(h)
        return functional.dropout(self.down(h), 0.3, self.training)


def sharded(plan):
    return {name.rpartition(".")[2] for name in plan.styles}


@pytest.mark.parametrize("clipped", ["up", "down"])
def test_layers_that_training_uses_by_their_weights_alone_stay_whole(clipped):
    plan = infer(Block(mlp=Gated(), other=ClippedInTraining(clipped)))
    assert sharded(plan) == {"gate", "up", "down"}
    assert all(name.startswith("0.parts.mlp.") for name in plan.styles)
    assert plan.reasons["0.parts.other.up"].endswith("the block gives different results")


def test_a_block_that_gets_another_argument_in_training_is_tried_with_that():
    x = torch.randn(3, 5, WIDTH)
    calls = {"0": ((x,), {"is_trained": False})}, {"0": ((x,), {"is_trained": True})}
    model = nn.Sequential(Flagged("down"))
    assert sharded(infer_plan(model, ["0"], calls[0], 2)) == {"up", "down"}
    assert not sharded(infer_plan(model, ["0"], calls[0], 2, {"0": [calls[1]["0"]]}))


@pytest.mark.parametrize("other", [Noisy(), ClampedInPlace()], ids=["noisy", "clamped"])
def test_what_can_be_sharded_in_training_too_is_sharded(other):
    assert sharded(infer(Block(other=other))) == {"up", "down"}


@pytest.mark.parametrize(("other", "is_other"), [(Noisy(), True), (ClampedInPlace(), True), (Attention(), False)])
def test_only_blocks_that_do_something_else_in_training_are_tried_there(other, is_other):
    block = Block(other=nn.Sequential(other, nn.Dropout(0.1)))
    reference = block_run.randomized_copy(block, [((torch.randn(3, 5, WIDTH),), {})])
    assert (reference.in_training is not None) == is_other


def test_weights_that_a_trial_in_training_writes_to_are_put_back():
    reference = block_run.randomized_copy(ClampedInPlace(), [((torch.randn(3, WIDTH),), {})])
    assert reference.block.down.weight.abs().max() > 0.1
    assert reference.in_training.block.down.weight.abs().max() > 0.1
    assert reference.in_training.copy().down.weight is not reference.in_training.block.down.weight
