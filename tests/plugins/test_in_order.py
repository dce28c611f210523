"""Steps end, with the same numbers, where all messages of a rank share one queue and sends wait for their receives."""

import pytest
import torch
from schedule.test_device_model import one_ahead
from support import assert_same, boosted, train
from torch import nn

from hybridpp.cluster import Loopback
from hybridpp.errors import DeadlockError
from hybridpp.pipeline import executor
from hybridpp.schedule import SCHEDULES

BATCHES = [torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])


def loss_of(outputs, inputs):
    return (outputs - inputs).square().mean()


def trained(in_order=True, **settings):
    return train(layers, BATCHES, criterion=loss_of, in_order=in_order, **settings)


@pytest.fixture(scope="module")
def one_process():
    return {m: trained(in_order=False, num_microbatches=m) for m in (1, 3, 4)}


@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize(("schedule", "pp_size"), [*((name, 2) for name in SCHEDULES), ("1f1b", 4), ("zb-h2", 4)])
def test_every_schedule_trains(one_process, schedule, pp_size, num_microbatches):
    actual = trained(schedule=schedule, pp_size=pp_size, num_microbatches=num_microbatches)
    assert_same(actual["weights"], one_process[num_microbatches]["weights"])


@pytest.mark.parametrize("layout", [{"dp_size": 2, "pp_size": 2}, {"tp_size": 2, "pp_size": 2}])
def test_other_groups_do_not_get_in_the_way(layout):
    expected = trained(in_order=False, num_microbatches=4, **layout)
    assert_same(trained(num_microbatches=4, **layout)["weights"], expected["weights"])


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v"])
def test_evaluation_ends(schedule):
    def run():
        settings = {"pp_size": 2, "schedule": schedule, "num_microbatches": 4}
        booster, model, _ = boosted(layers(), None, BATCHES[0][:2], **settings)
        with torch.no_grad():
            return booster.execute_pipeline(iter(BATCHES), model, loss_of, return_outputs=True)["outputs"]

    expected = layers()(BATCHES[0])
    ranks = Loopback(2, in_order=True).run(run)
    torch.testing.assert_close(next(outputs for outputs in ranks if outputs is not None), expected)


def test_receives_one_action_ahead_would_deadlock(monkeypatch):
    monkeypatch.setattr(executor, "lower", one_ahead)
    with pytest.raises(DeadlockError, match="every rank waits for another"):
        trained(schedule="1f1b", pp_size=2, num_microbatches=3)
    trained(in_order=False, schedule="1f1b", pp_size=2, num_microbatches=3)
