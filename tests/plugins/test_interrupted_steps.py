"""An error that a script catches in the middle of a step: the next step is right, or is refused on that rank."""

import re

import pytest
import torch
from plugins.zero_models import batches, cross_entropy, on_layout, step, weights_of, without_dropout
from support import assert_same, replica_part

from hybridpp.errors import UnlikeCallsError


class Breaks(Exception):
    """What a criterion raises."""


def failed_step(booster, model, optimizer, batch):
    """A step whose criterion raises for the second micro-batch, on every rank that calls it."""
    calls = []

    def criterion(logits, tokens):
        calls.append(tokens)
        if len(calls) == 2:
            raise Breaks("the criterion broke")
        return cross_entropy(logits, tokens)

    criterion.num_items = len  # else it is called again for a look at it
    part = replica_part(batch, booster.plugin.layout.here.dp, booster.plugin.dp_size)
    with pytest.raises(Breaks):
        booster.execute_pipeline(iter([part]), model, criterion, optimizer)


@pytest.mark.parametrize("evaluates", [False, True])
def test_what_would_follow_it_in_a_pipeline_is_refused(evaluates, tmp_path):
    message = (
        "a step ended in the middle on this rank, by Breaks: the criterion broke. Other ranks may still be in that "
        "step, and its messages on their way, so nothing can follow it. Let the error end the process, and resume from "
        "a checkpoint. To leave out a batch, check it before booster.execute_pipeline, on all ranks alike."
    )

    def run(booster, model, optimizer):
        step(booster, model, optimizer, batches(1, 16)[0])
        optimizer.step()
        taken = None if evaluates else optimizer
        with torch.set_grad_enabled(not evaluates):
            if booster.plugin.layout.here.pp == 0:
                # It is in the step until the other one ends.
                return step(booster, model, taken, batches(1, 16)[0])
            failed_step(booster, model, taken, batches(1, 16)[0])
        for call in (
            lambda: step(booster, model, optimizer, batches(1, 16)[0]),
            lambda: booster.save_model(model, tmp_path),
            lambda: booster.save_optimizer(optimizer, tmp_path),
        ):
            with pytest.raises(UnlikeCallsError, match=f"^{re.escape(message)}$"):
                call()
        raise Breaks("as at first")

    with pytest.raises(Breaks, match="as at first"):
        on_layout(run, dp_size=2, pp_size=2, zero_stage=1)


@pytest.mark.parametrize(
    ("settings", "accumulates"),
    [
        ({}, True),
        ({"zero_stage": 1}, False),
        ({"zero_stage": 2, "precision": "fp16"}, True),
        ({"zero_stage": 3}, False),
        ({"zero_stage": 3, "zero_reduce": "step", "tp_size": 2}, True),
    ],
)
def test_without_pipelines_the_next_step_is_right(settings, accumulates):
    def run(fails):
        def steps(booster, model, optimizer):
            losses = []
            for batch in batches(3, 16):
                if fails and accumulates:
                    # Its gradients are dropped with those of the step that fails.
                    step(booster, model, optimizer, batch.flip(0))
                if fails:
                    failed_step(booster, model, optimizer, batch)
                losses.append(step(booster, model, optimizer, batch))
                optimizer.step()
            with booster.unsharded(model):
                return losses, weights_of(model)

        return on_layout(steps, dp_size=2, make_model=without_dropout, **settings)

    for (losses, weights), (failed_losses, failed_weights) in zip(run(fails=False), run(fails=True), strict=True):
        assert failed_losses == losses
        assert_same(failed_weights, weights)
