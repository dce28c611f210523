import gc
import re
import weakref

import pytest
import torch

from hybridpp.cluster import Loopback, current_world
from hybridpp.errors import DeadlockError


def test_alone_there_is_a_world_of_one():
    world = current_world()
    assert (world.rank, world.size, world.device.type) == (0, 1, "cpu")
    total = torch.ones(2)
    world.control().all_reduce(total).wait()
    assert total.tolist() == [1, 1]


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


def test_a_group_orders_its_members_by_rank_for_any_order_of_the_list():
    def run():
        group = current_world().split([[2, 0], [1]])
        return group.ranks, group.rank, group.size, [part.item() for part in group.all_gather(torch.tensor(group.rank))]

    assert Loopback(3).run(run) == [((0, 2), 0, 2, [0, 1]), ((1,), 0, 1, [0]), ((0, 2), 1, 2, [0, 1])]


def test_a_rank_outside_all_groups_has_none():
    assert Loopback(2).run(lambda: current_world().split([[1]]) is None) == [True, False]


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


@pytest.mark.parametrize("failing", [0, 2])
def test_an_error_on_one_rank_ends_the_run_with_it(failing):
    ended = []

    def run():
        try:
            if current_world().rank == failing:
                raise KeyError("mine")
            current_world().control().all_gather(torch.zeros(1))
        finally:
            ended.append(current_world().rank)

    loopback = Loopback(3)
    with pytest.raises(KeyError, match="mine"):
        loopback.run(run)
    # Ranks that had begun cleaned up after themselves; the others never began.
    assert set(ended) == ({0} if failing == 0 else {0, 1, 2})
    assert loopback.run(lambda: current_world().rank) == [0, 1, 2]


def test_of_a_run_that_failed_nothing_is_kept_by_what_has_its_groups():
    """As a node of autograd's graph has: what it holds is not seen by the search for garbage."""
    groups, tensors = [], []

    def run():
        groups.append(current_world().split([[0, 1]]))
        tensor = torch.ones(1)
        tensors.append(weakref.ref(tensor))
        raise ValueError(f"no use for {tensor}")

    with pytest.raises(ValueError, match="no use"):
        Loopback(2).run(run)
    gc.collect()
    assert groups
    assert tensors[0]() is None


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


def test_the_world_inside_is_gone_outside():
    Loopback(3).run(lambda: None)
    assert current_world().size == 1
