"""Buffers that training writes to, over replicas: everyone evaluates with what is saved."""

import pytest
import torch
from support import assert_near, boosted, replica_part, sgd
from torch import nn
from torch.nn import functional as F

from hybridpp.cluster import Loopback


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(4)])

    def forward(self, x):
        return self.body(x)


class Counting(Normed):
    """Keeps something else, too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.seen += x.detach().sum()
        self.scratch += 1
        return super().forward(x)


def rows(size, seed=0):
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(seed))


def squares(outputs, inputs):
    return F.mse_loss(outputs, inputs.flip(1))


def after_training(num_microbatches, steps=3, **layout):
    """By rank: the state and what the model gives in evaluation."""

    def run():
        dp = layout.get("dp_size", 1)
        booster, model, optimizer = boosted(
            Normed(), sgd, rows(4), num_microbatches=num_microbatches, pp_size=layout.get("pp_size", 1)
        )
        for step in range(steps):
            batch = replica_part(rows(16, step), booster.plugin.layout.here.dp, dp)
            booster.execute_pipeline(iter([batch]), model, squares, optimizer)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            loss = booster.execute_pipeline(iter([rows(8, 9)]), model, squares)["loss"]
        return {"loss": loss, **{name: value.clone() for name, value in model.state_dict().items()}}

    return Loopback(layout.get("dp_size", 1) * layout.get("pp_size", 1)).run(run)


@pytest.mark.parametrize("pp_size", [1, 2])
def test_replicas_train_evaluate_and_keep_what_one_process_would(pp_size):
    (expected,) = after_training(4)
    ranks = after_training(2, dp_size=2, pp_size=pp_size)
    for replica in (ranks[:pp_size], ranks[pp_size:]):
        assert_near({name: value for rank in replica for name, value in rank.items()}, expected)
    for rank, other in zip(ranks[:pp_size], ranks[pp_size:], strict=True):
        assert_near(rank, other, 0)


def test_a_backward_pass_by_hand_leaves_them_equal():
    def run():
        booster, model, optimizer = boosted(Normed(), sgd, None)
        batch = rows(4, booster.plugin.layout.here.dp)
        with booster.no_sync(model, optimizer):
            booster.backward(squares(model(batch), batch), optimizer)
        booster.backward(squares(model(batch), batch), optimizer)
        optimizer.step()
        return dict(model.named_buffers())

    first, second = Loopback(2).run(run)
    assert_near(first, second, 0)
    assert first["body.0.1.num_batches_tracked"] == 2


@pytest.mark.parametrize(
    ("broadcast", "kept"), [(True, "the 2 replicas take those of the first"), (False, "keeps its own")]
)
@pytest.mark.parametrize("dp_size", [1, 2])
def test_other_buffers_that_the_forward_writes_to_are_told_once(dp_size, broadcast, kept, caplog):
    def run():
        booster, model, optimizer = boosted(Counting(), sgd, None, broadcast_buffers=broadcast)
        for step in range(2):
            booster.execute_pipeline(iter([rows(4, step)]), model, squares, optimizer)
            optimizer.step()

    Loopback(dp_size).run(run)
    told = [record.getMessage() for record in caplog.records if "writes to" in record.getMessage()]
    assert len(told) == dp_size - 1
    assert all("the forward writes to the buffers seen. " in text and kept in text for text in told)
