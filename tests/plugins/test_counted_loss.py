"""The number of items of a step's loss, and the mean of losses over batches that follows."""

import pytest
import torch
from support import sgd
from torch import nn
from torch.nn import functional

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback
from hybridpp.trainer import Trainer

_LENGTHS = [6, 1, 2, 6, 1, 5, 3, 3]
_ROWS = torch.randn(8, 6, 4, generator=torch.Generator().manual_seed(0))
_MASK = torch.arange(6) < torch.tensor(_LENGTHS)[:, None]
_TARGETS = (torch.arange(48).view(8, 6) % 5).masked_fill(~_MASK, -100)


def _tagger():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))


def _cross_entropy(logits, batch):
    return functional.cross_entropy(logits.transpose(1, 2), batch[1])


def _masked(logits, batch):
    losses = functional.cross_entropy(logits.transpose(1, 2), batch[1], reduction="none")
    mask = (batch[1] != -100).float()
    return (losses * mask).sum() / mask.sum().clamp(min=1)


@pytest.mark.parametrize("criterion", [_cross_entropy, _masked])
@pytest.mark.parametrize(
    ("pp_size", "dp_size", "batch_size", "num_microbatches"),
    [(1, 1, 8, 1), (1, 1, 2, 1), (2, 2, 2, 1), (1, 2, 1, 1), (2, 1, 4, 2)],
)
def test_the_loss_of_an_epoch_is_that_of_all_items(criterion, pp_size, dp_size, batch_size, num_microbatches):
    with torch.no_grad():
        exact = _cross_entropy(_tagger()(_ROWS), (_ROWS, _TARGETS)).item()

    def run():
        plugin = HybridParallelPlugin(pp_size=pp_size, num_microbatches=num_microbatches)
        booster, model = Booster(plugin=plugin, device="cpu"), _tagger()
        loader = plugin.prepare_dataloader(list(zip(_ROWS, _TARGETS, strict=True)), batch_size)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        trainer = Trainer(booster, booster.boost(model, optimizer, criterion, loader))
        trainer.fit(epochs=1)
        with torch.no_grad():
            result = booster.execute_pipeline(iter(loader), trainer.model, criterion)
        here = plugin.layout.here.dp
        return trainer.metrics["train/loss"], trainer.evaluate(loader)["test/loss"], here, float(result["num_items"])

    for trained, evaluated, replica, num_items in Loopback(pp_size * dp_size).run(run):
        assert [trained, evaluated] == pytest.approx([exact, exact], rel=1e-5)
        assert num_items == sum(_LENGTHS[replica * batch_size :][:batch_size])


def test_num_items_are_those_the_criterion_declares_and_samples_of_a_sum():
    class Declared(nn.Module):
        def forward(self, logits, batch):
            return logits.mean()

        def num_items(self, batch):
            return 3.5 * len(batch[0])

    def summed(logits, batch):
        return logits.sum()

    summed.reduction = "sum"
    booster, model = Booster(plugin=HybridParallelPlugin(num_microbatches=2), device="cpu"), _tagger()
    model, optimizer, *_ = booster.boost(model, sgd(model.parameters()), sample=_ROWS[:1])
    found = [
        float(booster.execute_pipeline(iter([(_ROWS, _TARGETS)]), model, criterion, optimizer)["num_items"])
        for criterion in (Declared(), summed)
    ]
    assert found == [28, 8]


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_replica_without_items_reports_a_loss_of_0_in_evaluation(num_microbatches):
    def run():
        plugin = HybridParallelPlugin(num_microbatches=num_microbatches)
        booster, replica = Booster(plugin=plugin), plugin.layout.here.dp
        batch = _ROWS[:2], _TARGETS[:2] if replica else torch.full((2, 6), -100)
        model = _tagger()
        model = booster.boost(model, sgd(model.parameters()), _cross_entropy, sample=batch).model
        with torch.no_grad():
            results = [booster.execute_pipeline(iter([batch]), model, _cross_entropy) for _ in range(2)]
        return [(result["loss"].item(), float(result["num_items"])) for result in results]

    empty, full = Loopback(2).run(run)
    assert empty == [(0.0, 0.0)] * 2
    assert all(loss > 1 and num_items == sum(_LENGTHS[:2]) for loss, num_items in full)
