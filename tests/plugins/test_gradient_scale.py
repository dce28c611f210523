"""Gradients that blocks add in their own backward pass count as the criterion's loss does, in every layout."""

import functools

import pytest
import torch
from support import assert_near, boosted, gradients_of, sgd
from torch import nn

from hybridpp import Booster
from hybridpp.cluster import Loopback

WIDTH = 4


class AddLoss(torch.autograd.Function):
    """Megatron's form of an auxiliary loss: activations go through, and its gradient is added in the backward pass."""

    @staticmethod
    def forward(ctx, x, loss, scale):
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.tensor(ctx.scale(), dtype=gradient.dtype), None


class Block(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.layer, self.router, self.scale = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), scale

    def forward(self, x):
        loss = self.router(x).softmax(-1).mean(0).square().sum()
        self.loss = loss
        return AddLoss.apply(x + self.layer(x).tanh(), loss, self.scale)


def make_model(scale):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(scale) for _ in range(4)))


def mean_square(outputs, inputs=None):
    return outputs.float().square().mean()


BATCH = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0))


@functools.cache
def expected(*sizes):
    """The gradients of all losses themselves, weighted by samples, in one process over micro-batches of these sizes."""
    model = make_model(lambda: 0.0)
    for part in BATCH.split(sizes):
        loss = mean_square(model(part)) + sum(block.loss for block in model)
        (loss * len(part) / len(BATCH)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def on_ranks(num_ranks, run, **settings):
    """What ``run(booster, model, optimizer, replica)`` gives on all ranks, of a model whose blocks add gradients."""

    def rank():
        held = []
        model = make_model(lambda: held[0].gradient_scale)
        booster, model, optimizer = boosted(model, sgd, BATCH[:1], **settings)
        held.append(booster)
        return run(booster, model, optimizer, booster.plugin.layout.here.dp)

    return Loopback(num_ranks).run(rank)


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"microbatch_size": 4}, (4, 2)),
        ({"pp_size": 2, "microbatch_size": 4, "schedule": "zb-h1", "gradient_checkpoint_config": {}}, (4, 2)),
        # The replicas have four samples and two.
        ({"dp_size": 2, "microbatch_size": 3}, (3, 1, 2)),
        ({"dp_size": 2, "pp_size": 2, "microbatch_size": 3, "zero_stage": 1}, (3, 1, 2)),
        ({"precision": "fp16", "microbatch_size": 4}, (4, 2)),
    ],
)
def test_an_added_gradient_counts_as_a_loss_in_every_layout(settings, sizes):
    dp_size = settings.get("dp_size", 1)
    settings = {name: value for name, value in settings.items() if name != "dp_size"}

    def run(booster, model, optimizer, replica):
        part = BATCH.split((4, 2))[replica] if dp_size == 2 else BATCH
        booster.execute_pipeline(iter([part]), model, mean_square, optimizer)
        scale = optimizer.loss_scale
        return {name: gradient / scale for name, gradient in gradients_of(booster, model).items()}

    found = {}
    for gradients in on_ranks(dp_size * settings.get("pp_size", 1), run, **settings):
        found |= gradients
    assert_near(found, expected(*sizes), 2e-3 if "precision" in settings else 1e-6)


def test_an_added_gradient_counts_as_a_loss_in_passes_of_the_script():
    def run(booster, model, optimizer, replica):
        booster.backward(mean_square(model(BATCH.split(3)[replica])), optimizer)
        return gradients_of(booster, model)

    assert_near(on_ranks(2, run)[0], expected(3, 3))


def test_outside_of_passes_and_in_evaluation_the_factor_is_one():
    def run(booster, model, optimizer, replica):
        found = [booster.gradient_scale]

        def criterion(outputs, inputs):
            found.append(booster.gradient_scale)
            return mean_square(outputs)

        criterion.reduction = "mean"  # it is not called on halves of the samples to find that out
        with torch.no_grad():
            booster.execute_pipeline(iter([BATCH]), model, criterion, None)
        booster.execute_pipeline(iter([BATCH]), model, criterion, optimizer)
        return [*found, booster.gradient_scale]

    assert on_ranks(2, run) == [[1.0, 1.0, 0.5, 1.0]] * 2
    assert Booster().gradient_scale == 1.0
