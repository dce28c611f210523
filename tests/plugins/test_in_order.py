"""Steps end, with the same numbers, where all messages of a rank share one queue and sends wait for their receives."""

import pytest
import torch
from hybridpp_plugins.layout import Layout
from schedule.test_device_model import one_ahead
from support import assert_same, boosted, sgd, train
from torch import nn

from hybridpp.cluster import Loopback, current_world
from hybridpp.cluster.loopback_group import LoopbackGroup
from hybridpp.cluster.loopback_messages import MessageQueues
from hybridpp.errors import DeadlockError
from hybridpp.pipeline import rank_program
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


@pytest.mark.covering
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
    monkeypatch.setattr(rank_program, "lower", lambda programs, *, reduces_each: one_ahead(programs))
    with pytest.raises(DeadlockError, match="every rank waits for another"):
        trained(schedule="1f1b", pp_size=2, num_microbatches=3)
    trained(in_order=False, schedule="1f1b", pp_size=2, num_microbatches=3)


@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [
        (3, {"pp_size": 3}),
        (2, {"pp_size": 2, "schedule": "interleaved"}),
        (2, {"pp_size": 1}),
        (2, {"tp_size": 2, "tensor_parallel_plan": {"0": "column", "1": "row"}}),
    ],
)
def test_a_step_makes_no_connection_that_boost_has_not_made(monkeypatch, num_ranks, settings):
    in_a_step, made = set(), []
    connect, all_reduce = MessageQueues.connect, LoopbackGroup.all_reduce

    def connecting(self, group, rank, peer):
        is_first = connect(self, group, rank, peer)
        if is_first and rank in in_a_step:
            made.append((rank, peer))
        return is_first

    def reducing(self, tensor):
        if "all_reduce" not in self._num_collectives and self._world_rank in in_a_step and self.size > 1:
            made.append(self.ranks)
        return all_reduce(self, tensor)

    def run():
        booster, model, optimizer = boosted(layers(), sgd, BATCHES[0][:2], num_microbatches=2, **settings)
        in_a_step.add(current_world().rank)
        booster.execute_pipeline(iter(BATCHES), model, loss_of, optimizer)

    monkeypatch.setattr(MessageQueues, "connect", connecting)
    monkeypatch.setattr(LoopbackGroup, "all_reduce", reducing)
    Loopback(num_ranks, in_order=True).run(run)
    assert made == []
    monkeypatch.setattr(Layout, "connect", lambda *arguments: None)
    in_a_step.clear()
    Loopback(num_ranks, in_order=True).run(run)
    assert made, "without it, the step does"
