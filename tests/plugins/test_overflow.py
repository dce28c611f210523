"""fp16 overflow anywhere: one decision, nothing lost, and the user is told."""

import functools
import itertools
import logging
import math

import pytest
import torch
from divided_models import VIT
from support import assert_same, boosted, image_batch, model_loss, replica_part, sgd, tiny_vit

from hybridpp.cluster import Loopback, current_world

BATCH = image_batch(4)
NUM_RANKS, NUM_PARAMETERS = 4, 20  # of each grid, and on each of its ranks
# Of the two ranks of a stage, and of the two replicas or shards, each has every other parameter.
CASES = [
    (rank, place)
    for rank, place in itertools.product(range(NUM_RANKS), range(NUM_PARAMETERS))
    if (place + rank + rank // 2) % 2 == 0
]


@pytest.mark.parametrize("tp_size", [1, 2])
def test_an_infinite_gradient_of_any_parameter_on_any_rank_makes_all_skip(tp_size):
    """Of pp2 x dp2 and tp2 x pp2; on the latter also where ranks hold copies of a parameter, of which one counts."""

    def run():
        booster, model, optimizer = boosted(
            tiny_vit(num_layers=2),
            functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
            image_batch(2),
            tp_size=tp_size,
            pp_size=2,
            tensor_parallel_plan=VIT,
            precision="fp16",
            initial_scale=2.0**10,
            backoff_factor=0.9,
            min_scale=0.1,
        )
        mine = replica_part(BATCH, booster.plugin.layout.here.dp, booster.plugin.dp_size)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        parameters = list(model.parameters())
        assert len(parameters) == NUM_PARAMETERS
        scales = []
        for rank, place in CASES:
            handle = None
            if current_world().rank == rank:
                handle = parameters[place].register_hook(lambda gradient: torch.full_like(gradient, math.inf))
            booster.execute_pipeline(iter([mine]), model, model_loss, optimizer)
            optimizer.step()
            assert optimizer.last_step_skipped
            assert not optimizer.unwrap().state, "no momentum was touched"
            scales.append(optimizer.loss_scale)
            if handle is not None:
                handle.remove()
        assert_same(model.state_dict(), before)
        return scales, optimizer.skipped_steps

    (scales, skipped), *others = Loopback(NUM_RANKS).run(run)
    assert others == [(scales, skipped)] * 3
    assert skipped == len(CASES)
    assert scales == pytest.approx([2.0**10 * 0.9 ** (n + 1) for n in range(skipped)])


def skip_until_found(initial_scale, steps=30):
    """Train from a scale that is too large; the messages, and how it ended."""

    def run():
        booster, model, optimizer = boosted(
            tiny_vit(), sgd, image_batch(2), pp_size=2, precision="fp16", initial_scale=initial_scale, hysteresis=2
        )
        for _ in range(steps):
            booster.execute_pipeline(iter([BATCH]), model, model_loss, optimizer)
            optimizer.step()
        return optimizer.skipped_steps, optimizer.applied_steps, optimizer.loss_scale

    first, second = Loopback(2).run(run)
    assert first == second
    return first


def test_a_scale_that_is_too_large_is_found_and_told(caplog):
    with caplog.at_level(logging.WARNING, logger="hybridpp"):
        skipped, applied, scale = skip_until_found(2.0**24)
    assert 0 < skipped < 20
    assert (skipped + applied, scale) == (30, 2.0 ** (24 - skipped))
    messages = [record.getMessage() for record in caplog.records]
    first, *_, last = messages
    assert first.startswith(
        "[rank 0] a gradient overflowed in fp16: step skipped, loss scale 1.67772e+07 -> 8.38861e+06"
    )
    assert last == (
        f"[rank 0] the loss scale was found: {scale:g}, after {skipped} skipped steps. Pass initial_scale={scale:g} to "
        "avoid skipping steps."
    )
    assert len(messages) == 2 + (skipped >= 10)


def test_a_scale_that_fits_says_nothing(caplog):
    with caplog.at_level(logging.DEBUG, logger="hybridpp"):
        assert skip_until_found(2.0**8, steps=3) == (0, 3, 2.0**8)
    assert not [record for record in caplog.records if "scale" in record.getMessage()]
