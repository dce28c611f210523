"""Ranks inside one process run one at a time, in a fixed order, and a deadlock is told."""

import re

import pytest
import torch

from hybridpp.cluster import Loopback, current_world
from hybridpp.errors import DeadlockError


def receive_from(peer):
    current_world().control().receive(torch.zeros(1), peer).wait()


def one_rank_goes_away():
    if current_world().rank:
        current_world().control().all_reduce(torch.zeros(1)).wait()


def different_collectives():
    group = current_world().control()
    (group.all_gather if group.rank else group.all_reduce)(torch.zeros(1)).wait()


@pytest.mark.parametrize(
    ("function", "places"),
    [
        (
            lambda: receive_from(1 - current_world().rank),
            "rank 0 waits for a message from rank 1; rank 1 waits for a message from rank 0",
        ),
        (one_rank_goes_away, "rank 1 waits for all_reduce number 1 of ranks (0, 1)"),
        (
            different_collectives,
            "rank 0 waits for all_reduce number 1 of ranks (0, 1); rank 1 waits for all_gather number 1 of ranks "
            "(0, 1)",
        ),
    ],
)
def test_a_deadlock_names_who_waits_for_what(function, places):
    with pytest.raises(DeadlockError, match=f"^{re.escape(f'every rank waits for another: {places}.')}$"):
        Loopback(2).run(function)


def test_ranks_run_in_a_fixed_order_and_switch_only_where_one_waits():
    def order():
        turns = []

        def run():
            group = current_world().control()
            for step in range(3):
                turns.append((step, group.rank))
                torch.rand(1)
                turns.append((step, group.rank))
                group.all_reduce(torch.zeros(1)).wait()

        Loopback(3).run(run)
        return turns

    turns = order()
    assert turns == order()
    assert turns[::2] == turns[1::2]
    assert [rank for step, rank in turns[::2] if step == 0] == [0, 1, 2]


def test_each_rank_has_its_own_numbers_of_every_generator(monkeypatch):
    device = torch.Generator()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", (device,))

    def draw():
        group = current_world().control()
        numbers = []
        for generator in (torch.default_generator, device):
            generator.manual_seed(group.rank)
        for _ in range(2):
            group.all_reduce(torch.zeros(1)).wait()
            numbers.append([torch.rand(1, generator=one).item() for one in (torch.default_generator, device)])
        return numbers

    def alone(seed):
        one = torch.Generator().manual_seed(seed)
        return [[torch.rand(1, generator=one).item()] * 2 for _ in range(2)]

    assert Loopback(2).run(draw) == [alone(0), alone(1)]
