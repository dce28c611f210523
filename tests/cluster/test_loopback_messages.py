"""Messages in one process, delivered at once or as the strictest device delivers them."""

import pytest
import torch

from hybridpp.cluster import Loopback, current_world
from hybridpp.errors import DeadlockError


def on_two_ranks(first, second, in_order, groups=1):
    """What each of two ranks returns; they get their groups and a tensor of their own."""

    def run():
        made = [current_world().split([[0, 1]]) for _ in range(groups)]
        return (first, second)[current_world().rank](*made)

    return Loopback(2, in_order=in_order).run(run)


def sends(number, group):
    return group.send(torch.full((2,), float(number)), 1 - group.rank)


def receives(group):
    return group.receive(tensor := torch.zeros(2), 1 - group.rank), tensor


def received(group):
    work, tensor = receives(group)
    work.wait()
    return tensor[0].item()


@pytest.mark.parametrize("in_order", [False, True])
def test_messages_of_one_direction_arrive_in_order(in_order):
    def first(group):
        for work in [sends(number, group) for number in range(3)]:
            work.wait()

    assert on_two_ranks(first, lambda group: [received(group) for _ in range(3)], in_order)[1] == [0, 1, 2]


def test_a_send_is_done_at_once_unless_messages_are_in_order():
    def both(group):
        sends(group.rank, group).wait()
        return received(group)

    assert on_two_ranks(both, both, in_order=False) == [1, 0]
    with pytest.raises(DeadlockError, match="rank 0 waits for rank 1 to receive; rank 1 waits for rank 0 to receive"):
        on_two_ranks(both, both, in_order=True)


def test_a_receive_posted_first_holds_up_what_is_sent_behind_it():
    def receiving_first(group):
        work, tensor = receives(group)
        sends(group.rank, group)
        work.wait()
        return tensor[0].item()

    assert on_two_ranks(receiving_first, receiving_first, in_order=False) == [1, 0]
    with pytest.raises(DeadlockError, match="rank 0 waits for a message from rank 1"):
        on_two_ranks(receiving_first, receiving_first, in_order=True)


def test_all_groups_of_a_rank_have_one_queue():
    def up_then_down(up, down):
        work = sends(7, up)
        back = received(down)
        work.wait()
        return back

    def down_then_up(up, down):
        work = sends(8, down)
        got = received(up)
        work.wait()
        return got

    assert on_two_ranks(up_then_down, down_then_up, in_order=False, groups=2) == [8, 7]
    with pytest.raises(DeadlockError):
        on_two_ranks(up_then_down, down_then_up, in_order=True, groups=2)


def test_the_first_message_in_a_group_waits_for_the_other_rank():
    """The groups' first uses are crossed; with messages under way there would be no conflict."""

    def first(one, other):
        return sends(0, one), receives(other)[0].wait()

    def second(one, other):
        return sends(1, other), receives(one)[0].wait()

    on_two_ranks(first, second, in_order=False, groups=2)
    with pytest.raises(DeadlockError, match="the first message of rank 1 in its group"):
        on_two_ranks(first, second, in_order=True, groups=2)


def test_what_is_sent_in_order_is_read_when_it_is_received():
    def first(group):
        sends(1, group).wait()  # so that the next one does not wait for the other rank
        work = group.send(tensor := torch.zeros(2), 1)
        tensor.fill_(3.0)
        work.wait()

    def second(group):
        return received(group), received(group)

    assert on_two_ranks(first, second, in_order=False)[1] == (1, 0)
    assert on_two_ranks(first, second, in_order=True)[1] == (1, 3)


@pytest.mark.parametrize("in_order", [False, True])
def test_messages_of_another_size_are_an_error(in_order):
    def first(group):
        group.send(torch.zeros(3), 1).wait()

    with pytest.raises(AssertionError, match=r"sent torch.float32 \(3,\), expected torch.float32 \(2,\)"):
        on_two_ranks(first, received, in_order)
