"""Gradients under schedules with W, of weights that deferred layers and other code use."""

import pytest
import torch
from support import assert_near, train, trained_alone
from torch import nn
from torch.func import functional_call

from hybridpp.data_parallel import accumulator
from hybridpp.data_parallel.accumulator import GradientHooks

WIDTH, VOCABULARY = 6, 11
# One stage begins with the embedding and the other ends with the head, both on the first rank.
ZERO_BUBBLE_V = {"pp_size": 2, "schedule": "zb-v", "num_model_chunks": 2, "num_microbatches": 2}


class Scaled(nn.Embedding):
    """An embedding with a forward of its own, whose gradient is not deferred."""

    def forward(self, ids):
        return super().forward(ids) * WIDTH**0.5


class Changed(nn.Module):
    """A block whose layer runs with a trained change of its weight."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.change = nn.Parameter(torch.full((WIDTH, WIDTH), 0.1))

    def forward(self, x):
        weight = self.layer.weight + self.change
        return x + functional_call(self.layer, {"weight": weight}, (x,)).tanh()


class Model(nn.Module):
    """Blocks between an embedding and a head of one weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = Scaled(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Changed() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mean_square(outputs, inputs):
    return outputs.float().square().mean()


BATCHES = [{"ids": torch.randint(0, VOCABULARY, (4, 3), generator=torch.Generator().manual_seed(n))} for n in range(3)]


@pytest.mark.parametrize("dp_size", [1, 2])
def test_code_that_shares_a_deferred_layers_weight_adds_to_its_gradient(dp_size):
    alone = trained_alone(Model, BATCHES, criterion=mean_square, num_microbatches=2)
    settings = ZERO_BUBBLE_V | {"num_microbatches": 2 // dp_size}
    together = train(Model, BATCHES, dp_size=dp_size, criterion=mean_square, **settings)
    assert_near(together["weights"], alone["weights"])


def test_no_pass_leaves_a_half_precision_gradient_for_the_next_to_add_to(monkeypatch):
    left = []
    before = GradientHooks.end_backward

    def end_backward(self):
        before(self)
        left.extend(name for name, parameter in self._parameters.items() if parameter.grad is not None)

    monkeypatch.setattr(GradientHooks, "end_backward", end_backward)
    monkeypatch.setattr(accumulator, "_MAX_SMALL", 0)
    train(Model, BATCHES, criterion=mean_square, precision="bf16", **ZERO_BUBBLE_V)
    assert left == []
