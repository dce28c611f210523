"""Ranks inside one process exchange what processes would."""

import re

import pytest
import torch

from hybridpp.cluster import Loopback, current_world


def test_collectives():
    def run():
        group = current_world().split([[0, 1, 2]])
        mine = torch.tensor([float(group.rank), 10.0])
        work = group.all_reduce(mine)
        work.wait()
        work.wait()
        return mine.tolist(), [part.item() for part in group.all_gather(torch.tensor(group.rank))]

    assert Loopback(3).run(run) == [([3.0, 30.0], [0, 1, 2])] * 3


def test_parts_are_gathered_and_sums_scattered_along_a_dimension():
    def run():
        group = current_world().split([[0, 1]])
        mine = torch.tensor([[0.0, 1.0], [2.0, 3.0]]) + 10 * group.rank
        return [
            group.all_gather_along(mine, 1).tolist(),
            group.reduce_scatter(mine, 0).tolist(),
            group.reduce_scatter(mine, -1).tolist(),
        ]

    side_by_side = [[0, 1, 10, 11], [2, 3, 12, 13]]
    assert Loopback(2).run(run) == [[side_by_side, [[10, 12]], [[10], [14]]], [side_by_side, [[14, 16]], [[12], [16]]]]


def test_segments_are_summed_and_gathered_in_place():
    def run():
        group = current_world().split([[0, 1]])
        flat = torch.arange(4.0, requires_grad=True)
        with torch.no_grad():
            flat += 10 * group.rank
        group.reduce_scatter_segments(flat).wait()
        scattered = flat.tolist()
        group.all_gather_segments(flat).wait()
        return scattered, flat.tolist()

    assert Loopback(2).run(run) == [([10, 12, 2, 3], [10, 12, 14, 16]), ([10, 11, 14, 16], [10, 12, 14, 16])]


def test_a_group_orders_its_members_by_rank_for_any_order_of_the_list():
    def run():
        group = current_world().split([[2, 0], [1]])
        return group.ranks, group.rank, group.size, [part.item() for part in group.all_gather(torch.tensor(group.rank))]

    assert Loopback(3).run(run) == [((0, 2), 0, 2, [0, 1]), ((1,), 0, 1, [0]), ((0, 2), 1, 2, [0, 1])]


def test_messages_arrive_in_the_order_they_were_sent_whoever_comes_first():
    def run():
        group = current_world().split([[0, 1]])
        peer = 1 - group.rank
        received = [torch.zeros(2) for _ in range(4)]
        early = [group.receive(tensor, peer) for tensor in received[:2]]
        message = torch.zeros(2)
        for number in range(4):
            message.fill_(10 * group.rank + number)
            group.send(message, peer).wait()
        late = [group.receive(tensor, peer) for tensor in received[2:]]
        for work in reversed(early + late):
            work.wait()
        return [tensor[1].item() for tensor in received]

    assert Loopback(2).run(run) == [[10, 11, 12, 13], [0, 1, 2, 3]]


def test_groups_of_the_same_ranks_keep_their_messages_apart():
    def run():
        world = current_world()
        first, second = world.split([[0, 1]]), world.split([[0, 1]])
        if world.rank == 0:
            first.send(torch.tensor(1.0), 1)
            second.send(torch.tensor(2.0), 1)
            return None
        received = torch.zeros(2)
        second.receive(received[0], 0).wait()
        first.receive(received[1], 0).wait()
        return received.tolist()

    assert Loopback(2).run(run)[1] == [2.0, 1.0]


def test_reductions_under_way_at_once_are_told_apart():
    def run():
        totals = [torch.tensor(float(number)) for number in (1, 10)]
        for work in [current_world().control().all_reduce(total) for total in totals]:
            work.wait()
        return [total.item() for total in totals]

    assert Loopback(2).run(run) == [[2.0, 20.0]] * 2


def test_a_message_must_be_what_the_receiver_expects():
    def run():
        group = current_world().control()
        if group.rank == 0:
            group.send(torch.ones(1), 1)
        else:
            group.receive(torch.ones(3), 0).wait()

    with pytest.raises(AssertionError, match=re.escape("sent torch.float32 (1,), expected torch.float32 (3,)")):
        Loopback(2).run(run)
