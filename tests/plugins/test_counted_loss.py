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


def _losses(logits, batch):
    return functional.cross_entropy(logits, batch[1], reduction="none")


def _of_classes(present):
    def criterion(logits, batch):
        losses = _losses(logits, batch)
        return torch.stack([losses[batch[1] == one].mean() for one in present(batch[1])]).mean()

    return criterion


def _of_tasks(logits, batch):
    return sum(
        (_losses(logits, batch) * (batch[1] == one)).sum() / (batch[1] == one).sum().clamp(min=1) for one in (0, 1)
    )


@pytest.mark.parametrize(
    ("criterion", "first"),
    [
        (_of_classes(torch.unique), 0),
        (_of_classes(torch.unique), 1),  # a batch of one class
        (_of_classes(lambda classes: classes.unique().tolist()), 0),
        (_of_classes(lambda classes: [one for one in range(5) if (classes == one).any()]), 0),
        (_of_tasks, 0),
    ],
)
def test_samples_are_reported_of_what_is_a_mean_over_groups_of_them(criterion, first):
    classes = torch.tensor([[0, 1, 1, 2], [1, 1, 1, 1], [0, 0, 0, 1], [3, 4, 1, 0]])[first:]
    booster, model = Booster(plugin=HybridParallelPlugin(num_microbatches=1), device="cpu"), _tagger()
    model, optimizer, *_ = booster.boost(model, sgd(model.parameters()), sample=_ROWS[:1, 0])

    def num_items(rows, *optimizers):
        batch = iter([(_ROWS[: len(rows), 0], rows)])
        return float(booster.execute_pipeline(batch, model, criterion, *optimizers)["num_items"])

    assert [num_items(rows, optimizer) for rows in classes] == [4] * len(classes)
    with torch.no_grad():
        assert [num_items(rows) for rows in (classes[0, :3], classes[1])] == [3, 4]


def test_with_several_microbatches_samples_are_reported_of_groups_too():
    classes = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1])
    booster, model = Booster(plugin=HybridParallelPlugin(num_microbatches=2), device="cpu"), _tagger()
    model, optimizer, *_ = booster.boost(model, sgd(model.parameters()), sample=_ROWS[:1, 0])
    result = booster.execute_pipeline(iter([(_ROWS[:, 0], classes)]), model, _of_tasks, optimizer)
    assert result["num_items"] == 8


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
