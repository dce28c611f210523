"""State that a forward keeps for its next call is refused or named where a layout would change results."""

import logging

import pytest
import torch
from support import boosted, replica_part, sgd
from torch import nn
from torch.nn import functional as F

from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError

WIDTH = 6


class Recurrent(nn.Module):
    """Goes on from the states that its last call has left."""

    def __init__(self):
        super().__init__()
        self.cell, self.h = nn.GRUCell(WIDTH, WIDTH), None

    def forward(self, x):
        self.h = self.cell(x, self.h).detach() * 0.5
        return x + self.cell(x, self.h)


class Centred(nn.Module):
    """Moves a mean, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)

    def forward(self, x):
        self.calls += 1
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.linear(x - self.mean * min(1.0, self.calls / 10)).tanh()


class RecurrentLater(Recurrent):
    """The same, from when the script says so."""

    begins = False

    def forward(self, x):
        return super().forward(x) if self.begins else x + self.cell(x)


class CentredLater(Centred):
    """The same, from when the script says so."""

    begins = False

    def forward(self, x):
        return super().forward(x) if self.begins else self.linear(x).tanh()


def squares(outputs, inputs):
    return F.mse_loss(outputs, inputs.flip(1))


def train(make, num_steps=3, dp_size=1, **settings):
    """Some steps of two blocks, each with 4 samples in a micro-batch; how often the model was watched afterwards."""
    torch.manual_seed(0)
    size = 4 * settings.get("num_microbatches", 1) * dp_size
    batches = torch.randn(num_steps, size, WIDTH, generator=torch.Generator().manual_seed(0))
    blocks = [make(), make()]
    booster, model, optimizer = boosted(nn.Sequential(*blocks), sgd, batches[0], **settings)
    here = booster.plugin.layout.here.dp
    for number, batch in enumerate(batches):
        for block in blocks:
            block.begins = number >= 4
        booster.execute_pipeline(iter([replica_part(batch, here, dp_size)]), model, squares, optimizer)
        optimizer.step()


@pytest.mark.parametrize("pp_size", [1, 2])
def test_state_of_samples_is_refused_with_micro_batches(pp_size):
    text = r"keeps [01]\.h, of shape \[4, 6\], for its next call .* num_microbatches=1"
    with pytest.raises(ConfigError, match=text):
        Loopback(pp_size).run(lambda: train(Recurrent, 1, pp_size=pp_size, num_microbatches=2))


@pytest.mark.parametrize("pp_size", [1, 2])
def test_one_warning_names_the_state_of_all_stages(pp_size, caplog):
    Loopback(pp_size).run(lambda: train(Centred, pp_size=pp_size, num_microbatches=3))
    warnings = [record.getMessage() for record in caplog.records]
    (warning,) = [one for one in warnings if "its last call has left" in one]
    assert len(warnings) == 2, "another says that the mean is of a micro-batch"
    for name in ("0.mean", "0.calls", "1.mean", "1.calls"):
        assert name in warning
    assert "once for each of 3 micro-batches" in warning


def test_one_warning_names_what_each_replica_keeps(caplog):
    Loopback(2).run(lambda: train(Recurrent, dp_size=2))
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "has left in 0.h, 1.h, and each of the 2 replicas keeps its own" in warning


def test_one_micro_batch_on_one_rank_keeps_what_it_wants(caplog):
    train(Recurrent)
    train(Centred)
    assert not caplog.records


@pytest.mark.parametrize("pp_size", [1, 2])
def test_state_that_begins_later_is_looked_for_again(pp_size, caplog):
    with pytest.raises(ConfigError, match=r"keeps [01]\.h, of shape \[4, 6\], for its next call"):
        Loopback(pp_size).run(lambda: train(RecurrentLater, 8, pp_size=pp_size, num_microbatches=2))
    caplog.clear()
    Loopback(pp_size).run(lambda: train(CentredLater, 32, pp_size=pp_size, num_microbatches=2))
    (warning,) = [text for text in map(logging.LogRecord.getMessage, caplog.records) if "its last call" in text]
    assert all(name in warning for name in ("0.mean", "0.calls", "1.mean", "1.calls"))


def test_what_replicas_begin_to_keep_later_is_named_once(caplog):
    Loopback(2).run(lambda: train(RecurrentLater, 32, dp_size=2))
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "has left in 0.h, 1.h, and each of the 2 replicas keeps its own" in warning


@pytest.mark.parametrize("make", [Recurrent, RecurrentLater, Centred])
@pytest.mark.parametrize("zero_stage", [0, 3])
def test_a_loop_that_calls_the_model_is_told_of_what_replicas_keep(make, zero_stage, caplog):
    def run(num_replicas):
        torch.manual_seed(0)
        blocks = [make(), make()]
        booster, model, optimizer = boosted(nn.Sequential(*blocks), sgd, torch.ones(4, WIDTH), zero_stage=zero_stage)
        for number in range(20):
            for block in blocks:
                block.begins = number >= 4
            loss = model(torch.randn(4, WIDTH)).square().mean()
            booster.backward(loss, optimizer, num_items=1)
            optimizer.step()

    Loopback(2).run(lambda: run(2))
    (text,) = [text for one in caplog.records if "its last call" in (text := one.getMessage())]
    assert ("0.mean" if make is Centred else "0.h, 1.h") in text
    assert "each of the 2 replicas keeps its own" in text
    caplog.clear()
    run(1)
    assert not [one for one in caplog.records if "its last call" in one.getMessage()]
