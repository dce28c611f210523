"""Ranks that share layers compute one loss; one that does not is named by every rank."""

import logging
import math
import re

import pytest
import torch
from divided_models import VIT
from support import boosted, image_batch, model_loss, replica_part, sgd, tiny_vit

from hybridpp.cluster import Loopback, current_world
from hybridpp.errors import NonFiniteLossError, UnequalRanksError

BATCH = image_batch(4)


def losses(factor, *, training=True, on_rank=1, tp_size=2, pp_size=1, dp_size=1):
    """Of a step in which one rank's criterion multiplies by a factor."""

    def criterion(outputs, inputs):
        return outputs.loss * (factor if current_world().rank == on_rank else 1.0)

    criterion.reduction = "mean"  # else that replicas make it in unlike ways is refused first

    def run():
        booster, model, optimizer = boosted(
            tiny_vit(), sgd, image_batch(2), tp_size=tp_size, pp_size=pp_size, tensor_parallel_plan=VIT
        )
        mine = replica_part(BATCH, booster.plugin.layout.here.dp, dp_size)
        with torch.set_grad_enabled(training):
            for _ in range(2):
                loss = booster.execute_pipeline(iter([mine]), model, criterion, optimizer if training else None)["loss"]
        return loss.item()

    return Loopback(tp_size * pp_size * dp_size).run(run)


@pytest.mark.parametrize("training", [True, False])
def test_a_criterion_that_differs_between_ranks_is_refused(training):
    loss = tiny_vit()(**BATCH).loss.item()
    with pytest.raises(UnequalRanksError) as error:
        losses(1.1, training=training)
    found = re.fullmatch(
        r"tensor-parallel ranks must compute the same loss from the same batch: got (\S+) on rank 0, (\S+) on rank "
        r"1. Remove what differs between ranks from the model and the criterion \(a rank number, random numbers in the "
        r"criterion, a penalty of weights of which each rank has a part\), and change weights on all ranks in the same "
        r"way, as booster.load_model does.",
        str(error.value),
    )
    assert [float(value) for value in found.groups()] == pytest.approx([loss, 1.1 * loss], rel=1e-5)


def test_it_is_seen_on_any_replica_at_the_end_of_any_pipeline():
    with pytest.raises(UnequalRanksError, match=r"on rank 6, \S+ on rank 7"):
        losses(1.1, on_rank=6, pp_size=2, dp_size=2)


def test_a_loss_that_is_no_number_on_one_of_them_is_named():
    with pytest.raises(NonFiniteLossError, match=r"is NaN \(stage 0 of 1, rank 1\)"):
        losses(math.nan)


def test_a_difference_by_rounding_is_told_once(caplog):
    with caplog.at_level(logging.WARNING, logger="hybridpp"):
        losses(1.0 + 1e-6)
    (message,) = [text for record in caplog.records if "rounding" in (text := record.getMessage())]
    assert message.startswith("[rank 0] tensor-parallel ranks computed losses that differ by rounding: ")


def test_replicas_and_ranks_with_equal_losses_are_left_alone(caplog):
    with caplog.at_level(logging.WARNING, logger="hybridpp"):
        losses(1.0, dp_size=2)
        losses(1.1, tp_size=1, dp_size=2)
    assert not caplog.records


def test_weights_that_drift_apart_are_noticed():
    def run():
        booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2), tp_size=2, tensor_parallel_plan=VIT)
        if current_world().rank == 1:
            with torch.no_grad():
                model.classifier.bias[0] += 1.0
        booster.execute_pipeline(iter([BATCH]), model, model_loss, optimizer)

    with pytest.raises(UnequalRanksError):
        Loopback(2).run(run)
