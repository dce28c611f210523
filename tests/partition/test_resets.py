"""What container code throws away at the end of the forward is gone for the next micro-batch, on every stage."""

import re

import pytest
import torch
from partition import resetting_models
from support import assert_near, assert_same, train, trained_alone

from hybridpp.errors import PartitionError

# The third is of another length, so that it is traced when the model has run.
BATCHES = [torch.randn(6, length, 4, generator=torch.Generator().manual_seed(length)) for length in (3, 3, 6)]
LAYOUTS = (
    {"pp_size": 2},
    {"pp_size": 4},
    {"pp_size": 2, "schedule": "zb-v"},
)


def squares(outputs, inputs):
    return outputs.square().mean()


def run(make_model, batches=BATCHES, **settings):
    return train(make_model, batches, criterion=squares, num_microbatches=3, **settings)


@pytest.mark.covering
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    "make_model",
    [resetting_models.Pieces, resetting_models.Flags, resetting_models.Lists, resetting_models.ByContainerCode],
)
def test_what_container_code_throws_away_at_the_end_is_gone_on_every_stage(make_model, layout):
    expected = trained_alone(make_model, BATCHES, criterion=squares, num_microbatches=3)
    actual = run(make_model, **layout)
    assert actual["losses"] == [pytest.approx(expected["losses"][0], rel=1e-5)] * len(actual["losses"])
    assert_near(actual["gradients"], expected["gradients"])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_blocks_keep_between_calls_stays(layout):
    batches = BATCHES[:1] * 2
    expected = run(resetting_models.Memories, batches)
    actual = run(resetting_models.Memories, batches, **layout)
    assert actual["losses"] == [expected["losses"][0]] * len(actual["losses"])
    assert_same(actual["gradients"], expected["gradients"])


def test_a_state_that_container_code_replaces_after_the_cut_is_refused():
    text = (
        "container code puts a new tensor into the attribute 'state' of 'blocks.0' after the cut at 'blocks.1', where "
        "the stage that calls the unit has left the forward: its next call would find the old one. Do that in the unit "
        "or at the start of the forward, or use pp_size=1."
    )
    with pytest.raises(PartitionError, match=f"^{re.escape(text)}"):
        run(resetting_models.Replaced, pp_size=2)
