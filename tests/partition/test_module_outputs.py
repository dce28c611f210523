"""What blocks leave on themselves travels to the container code that reads it, or is refused by name."""

import gc
import re
import weakref

import pytest
import torch
from partition import aux_loss_models, user_models
from support import assert_near, boosted, sgd, train
from torch import nn

from hybridpp.cluster import Loopback
from hybridpp.errors import NonFiniteLossError, PartitionError

# The third is of another length, so that it is traced when the model has run.
BATCHES = [torch.randn(6, length, 4, generator=torch.Generator().manual_seed(length)) for length in (3, 3, 2)]
LAYOUTS = (
    {"pp_size": 2},
    {"pp_size": 4},
    {"pp_size": 2, "schedule": "zb-v"},
)
MODELS = [cls for cls in vars(aux_loss_models).values() if isinstance(cls, type) and cls in aux_loss_models.TO_ROUNDING]


def squares(outputs, inputs):
    return outputs.square().mean()


def run(make_model, **settings):
    return train(make_model, BATCHES, criterion=squares, num_microbatches=2, **settings)


@pytest.mark.parametrize(
    ("place", "make_model"), list(enumerate(MODELS)), ids=lambda value: getattr(value, "__name__", None)
)
def test_what_blocks_leave_is_found_by_container_code_on_any_stage(place, make_model):
    """Each in two of the layouts, half of them with blocks that are recomputed."""
    expected = run(make_model)
    recomputed = {"gradient_checkpoint_config": {}} if place % 2 else {}
    for layout in (LAYOUTS[place % 3], {**recomputed, **LAYOUTS[(place + 1) % 3]}):
        actual = run(make_model, **layout)
        assert actual["losses"] == [pytest.approx(expected["losses"][0], rel=1e-5)] * len(actual["losses"])
        assert_near(actual["gradients"], expected["gradients"])


def test_a_criterion_that_looks_for_what_did_not_travel_is_told_by_a_nan():
    """It is no part of the forward, so the trace does not see what it reads."""

    class Unread(user_models.Base):
        def __init__(self):
            super().__init__(aux_loss_models.Routed)

    def step():
        booster, model, optimizer = boosted(Unread(), sgd, BATCHES[0], pp_size=2, num_microbatches=2)

        def criterion(outputs, inputs):
            return outputs.mean() + sum(block.gate.aux_loss for block in model.blocks)

        with pytest.raises(NonFiniteLossError, match="the loss of micro-batch 0 is NaN"):
            booster.execute_pipeline(iter(BATCHES), model, criterion, optimizer)

    Loopback(2).run(step)


LOSSES = []


class Leaking(nn.Linear):
    """Leaves its loss where nobody can follow it."""

    def forward(self, x):
        h = super().forward(x)
        LOSSES.append(h.square().mean())
        return h


class GlobalList(user_models.Base):
    def __init__(self):
        super().__init__(Leaking)

    def forward(self, x):
        LOSSES.clear()
        x = super().forward(x)
        return x + torch.stack(LOSSES).sum()


def test_a_tensor_left_where_nobody_can_follow_it_is_refused():
    run(GlobalList)
    text = (
        "container code uses a tensor that unit 'blocks.0' created and did not return: what it stores outside its own "
        "modules cannot be sent to another stage. Return it, set it as an attribute of the module, or use pp_size=1."
    )
    with pytest.raises(PartitionError, match=f"^{re.escape(text)}"):
        run(GlobalList, pp_size=2)


def test_nothing_is_held_of_a_forward_that_is_over():
    """Neither what was received nor what was sent."""

    def step():
        booster, model, _ = boosted(user_models.Base(), None, BATCHES[0], pp_size=2, num_microbatches=2)
        seen = []
        for block in model.blocks:
            block.register_forward_hook(lambda module, inputs, output: seen.append(weakref.ref(output)))
        with torch.no_grad():
            booster.execute_pipeline(iter(BATCHES), model, squares)
        gc.collect()
        return [output() for output in seen]

    for held in Loopback(2).run(step):
        assert held
        assert not any(isinstance(output, torch.Tensor) for output in held)
