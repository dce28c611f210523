"""An error that the script catches on one of several replicas: the others get one, and if all go on, all is right."""

import re
from contextlib import nullcontext
from functools import cache, partial
from itertools import product

import pytest
import torch
from plugins.zero_models import (
    SAMPLE,
    batches,
    cross_entropy,
    on_layout,
    step,
    two_groups,
    weights_of,
    without_dropout,
)
from processes import run_ranks
from support import assert_same, replica_part
from torch import nn

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback, current_world
from hybridpp.errors import PeerError


class Breaks(Exception):
    """What is raised in a step."""


def step_that_breaks(place, booster, model, optimizer, batch):
    """A step in which an error is raised for the second micro-batch, in one place."""
    calls, loss_of = [], cross_entropy

    def second(*_):
        calls.append(1)
        if len(calls) == 2:
            raise Breaks("it broke")

    def criterion(logits, tokens):
        # Not by its calls: it is also called for a look at it.
        if not torch.equal(tokens[0], part[0]):
            raise Breaks("it broke")
        return cross_entropy(logits, tokens)

    criterion.reduction = "mean"
    block = model.blocks[2]
    if place == "criterion":
        loss_of, handle = criterion, None
    elif place == "forward":
        handle = block.register_forward_pre_hook(second)
    else:
        handle = block.register_full_backward_pre_hook(second)
    part = replica_part(batch, booster.plugin.layout.here.dp, booster.plugin.dp_size)
    try:
        booster.execute_pipeline(iter([part]), model, loss_of, optimizer)
    finally:
        if handle is not None:
            handle.remove()


CAUGHT = (
    "a step ended in the middle on {}, by an error that the script caught there. It counts on no rank: gradients "
    "that were added up are dropped. If the script catches this error, too, and goes on with its next batch, that step "
    "is right. To leave out a batch, check it before booster.execute_pipeline, on all ranks alike."
)


def caught_by_one(fails):
    """The losses and weights of three steps, before one of which there is one that fails on replica 1."""

    def steps(booster, model, optimizer, place="criterion"):
        here, losses = booster.plugin.layout.here.dp, []
        for number, batch in enumerate(batches(3, 24)):
            if fails and number == 1:
                with booster.no_sync(model):  # its gradients are dropped, too
                    step(booster, model, optimizer, batch.flip(0))
                if here == 1:
                    with pytest.raises(Breaks):
                        step_that_breaks(place, booster, model, optimizer, batch)
                else:
                    failed = "ranks 2, 3" if booster.plugin.tp_size == 2 else "rank 1"
                    with pytest.raises(PeerError, match=f"^{re.escape(CAUGHT.format(failed))}$"):
                        step(booster, model, optimizer, batch)
                optimizer.step()  # there is nothing to update with
            losses.append(step(booster, model, optimizer, batch))
            optimizer.step()
        with booster.unsharded(model):
            return losses, weights_of(model)

    return steps


EVERYWHERE = [
    {"dp_size": 2, "max_norm": 0.0},
    {"dp_size": 2, "zero_stage": 2, "ddp_bucket_cap_mb": 0.01},
    {"dp_size": 2, "zero_stage": 3},
]
IN_THE_CRITERION = [
    {"dp_size": 3},
    {"dp_size": 2, "zero_stage": 1, "precision": "fp16"},
    {"dp_size": 2, "zero_stage": 3, "zero_reduce": "step", "schedule": "gpipe"},
    {"dp_size": 4, "zero_stage": 2, "zero_size": 2},
    {"dp_size": 2, "zero_stage": 1, "tp_size": 2},
    {"dp_size": 2, "zero_stage": 3, "schedule": "interleaved", "num_model_chunks": 2},
    {"dp_size": 2, "zero_stage": 1, "schedule": "zb-h1"},
]


@cache
def undisturbed(**settings):
    return on_layout(caught_by_one(False), make_model=without_dropout, **settings)


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        *product(EVERYWHERE, ["criterion", "forward", "backward"]),
        *product(IN_THE_CRITERION, ["criterion"]),
    ],
    ids=str,
)
def test_an_error_that_one_replica_catches_reaches_the_others(settings, place):
    failed = on_layout(partial(caught_by_one(True), place=place), make_model=without_dropout, **settings)
    for (losses, weights), (failed_losses, failed_weights) in zip(undisturbed(**settings), failed, strict=True):
        assert failed_losses == losses
        assert_same(failed_weights, weights)


def _on_processes(fails):
    booster, model = Booster(plugin=HybridParallelPlugin(num_microbatches=4, zero_stage=2)), without_dropout()
    parts = booster.boost(model, two_groups(model.parameters()), criterion=cross_entropy, sample=SAMPLE)
    return caught_by_one(fails)(booster, parts.model, parts.optimizer)


def test_processes_go_on_as_well():
    plain, failed = (run_ranks(partial(_on_processes, fails), 2, timeout_s=120) for fails in (False, True))
    for (losses, weights), (failed_losses, failed_weights) in zip(plain, failed, strict=True):
        assert failed_losses == losses
        assert_same(failed_weights, weights)


def test_in_evaluation_the_others_get_it_with_the_loss():
    def run(booster, model, optimizer):
        [first, second] = batches(2, 16)
        with torch.no_grad():
            expected = step(booster, model, None, second)
            if booster.plugin.layout.here.dp == 1:
                with pytest.raises(Breaks):
                    step_that_breaks("criterion", booster, model, None, first)
            else:
                with pytest.raises(PeerError, match=f"^{re.escape(CAUGHT.format('rank 1'))}$"):
                    step(booster, model, None, first)
            return expected, step(booster, model, None, second)

    for settings in ({}, {"zero_stage": 3}):
        for expected, actual in on_layout(run, dp_size=2, make_model=without_dropout, **settings):
            assert actual == expected


def test_a_first_pass_that_an_error_ends_is_left_like_any_other():
    def run(booster, model, optimizer):
        batch = batches(1, 16)[0]
        if booster.plugin.layout.here.dp == 0:
            with pytest.raises(PeerError, match=f"^{re.escape(CAUGHT.format('rank 1'))}$"):
                step(booster, model, optimizer, batch)
        else:
            handle = model.blocks[0].register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                step(booster, model, optimizer, batch)
            handle.remove()
        return step(booster, model, optimizer, batch)

    losses = on_layout(run, dp_size=2, zero_stage=3, make_model=without_dropout)
    expected = on_layout(lambda *parts: step(*parts, batches(1, 16)[0]), dp_size=2, make_model=without_dropout)
    assert losses == expected


class Normed(nn.Module):
    """Keeps running statistics."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_running_statistics_stay_equal():
    def run():
        booster, model = Booster(plugin=HybridParallelPlugin(num_microbatches=4)), Normed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        calls, fails = [], current_world().rank == 1

        def criterion(outputs, inputs):
            calls.append(1)
            if fails and len(calls) == 6:
                raise Breaks("it broke")
            return outputs.square().mean()

        criterion.num_items = len  # else it is called again for a look at it
        parts = booster.boost(model, optimizer, criterion=criterion, sample=torch.ones(4, 8))
        generator = torch.Generator().manual_seed(current_world().rank)
        for number in range(3):
            batch = torch.randn(16, 8, generator=generator)
            with pytest.raises(Breaks if fails else PeerError) if number == 1 else nullcontext():
                booster.execute_pipeline(iter([batch]), parts.model, criterion, optimizer=parts.optimizer)
            parts.optimizer.step()
        return {name: buffer.clone() for name, buffer in model.named_buffers()}

    first, second = Loopback(2).run(run)
    assert_same(second, first)
