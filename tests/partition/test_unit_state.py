"""A block that is recomputed finds, the second time, what it kept on itself as it was at that call."""

import re
from types import SimpleNamespace

import pytest
import torch
from partition import resetting_models
from partition.user_models import Base
from support import assert_same, train
from torch import nn

from hybridpp.errors import PartitionError

BATCHES = [torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]


class InPlace(nn.Linear):
    """Multiplies by a buffer, a tensor and a number in an object, and changes all three."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.register_buffer("load", torch.ones(outputs))
        self.scale, self.notes = torch.ones(1), SimpleNamespace(inner=SimpleNamespace(count=0))

    def forward(self, x):
        h = super().forward(x) * self.load.clone() * self.scale.item() * (1 + self.notes.inner.count / 10)
        with torch.no_grad():
            self.load.mul_(1.1)
            self.scale.add_(0.05)
        self.notes.inner.count += 1
        return h


class Writing(Base):
    def __init__(self):
        super().__init__(InPlace)


class Frozen(nn.Module):
    """Its inner part runs, and writes, only when it is in training."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear, self.inner = nn.Linear(inputs, outputs), InPlace(inputs, outputs)

    def forward(self, x):
        return self.inner(x) if self.inner.training else self.linear(x)


class Thawing(Base):
    """Thaws its blocks after some calls."""

    def __init__(self):
        super().__init__(Frozen)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        for block in self.blocks:
            block.inner.train(self.calls > 3)
        return super().forward(x)


def squares(outputs, inputs):
    return outputs.square().mean()


def run(make_model, **settings):
    return train(make_model, BATCHES, criterion=squares, num_microbatches=3, **settings)


@pytest.mark.covering
@pytest.mark.parametrize("pp_size", [1, 2])
@pytest.mark.parametrize(
    "make_model",
    [
        resetting_models.Pieces,
        resetting_models.Flags,
        resetting_models.Lists,
        resetting_models.Memories,
        Writing,
        Thawing,
    ],
)
def test_a_recomputed_block_finds_what_it_kept_as_it_was_then(make_model, pp_size):
    expected = run(make_model, pp_size=pp_size)
    actual = run(make_model, pp_size=pp_size, gradient_checkpoint_config={})
    assert actual["losses"] == expected["losses"]
    assert_same(actual["gradients"], expected["gradients"])
    assert_same(actual["weights"], expected["weights"])


class Hidden(InPlace):
    """Writes to a tensor that an object of it holds."""

    def forward(self, x):
        self.notes.tensor = vars(self.notes).get("tensor", torch.ones(1))
        h = super().forward(x) * self.notes.tensor.item()
        self.notes.tensor.add_(1)
        return h


def test_a_tensor_out_of_sight_that_is_written_to_is_refused():
    text = (
        "unit 'blocks.0' writes in place to a tensor that it keeps, so it cannot be recomputed. Give the attribute a "
        "new tensor, or leave gradient_checkpoint_config out."
    )
    with pytest.raises(PartitionError, match=f"^{re.escape(text)}"):
        run(lambda: Base(Hidden), gradient_checkpoint_config={})
