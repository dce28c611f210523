import pytest
import torch

from hybridpp.cluster import DistCoordinator, Loopback, current_world


def test_alone_it_is_rank_0_of_1():
    coordinator = DistCoordinator()
    assert (coordinator.rank, coordinator.world_size, coordinator.local_rank) == (0, 1, 0)
    assert coordinator.is_master()
    assert coordinator.is_node_master()
    coordinator.block_all()
    coordinator.destroy()


def test_the_master_is_rank_0():
    assert Loopback(3).run(lambda: DistCoordinator().is_master()) == [True, False, False]


def test_only_the_master_prints(capsys):
    Loopback(3).run(lambda: DistCoordinator().print_on_master({"step": 1}))
    assert capsys.readouterr().out == "{'step': 1}\n"


def test_a_function_for_the_master_gives_none_elsewhere():
    called = []

    def run():
        @DistCoordinator().on_master_only
        def double(value, *, plus=0):
            """Twice the value."""
            called.append(current_world().rank)
            return 2 * value + plus

        return double(3, plus=1), double.__name__, double.__doc__

    assert Loopback(2).run(run) == [(7, "double", "Twice the value."), (None, "double", "Twice the value.")]
    assert called == [0]


@pytest.mark.parametrize("first", [0, 1, 2])
def test_priority_execution_lets_one_rank_go_first(first):
    order = []

    def run():
        coordinator = DistCoordinator()
        with coordinator.priority_execution(executor_rank=first):
            order.append(coordinator.rank)

    Loopback(3).run(run)
    assert order[0] == first
    assert sorted(order) == [0, 1, 2]


def test_others_do_not_wait_for_ever_for_a_rank_that_failed_in_its_turn():
    entered = []

    def run():
        coordinator = DistCoordinator()
        try:
            with coordinator.priority_execution():
                entered.append(coordinator.rank)
                if coordinator.is_master():
                    raise OSError("no space left")
        except OSError:
            return "failed"
        return "done"

    assert Loopback(2).run(run) == ["failed", "done"]
    assert entered == [0, 1]


def test_block_all_waits_for_every_rank():
    events = []

    def run():
        coordinator = DistCoordinator()
        for step in range(2):
            events.append(("before", step))
            coordinator.block_all()
            events.append(("after", step))

    Loopback(3).run(run)
    for step in range(2):
        last_before = max(place for place, event in enumerate(events) if event == ("before", step))
        assert last_before < events.index(("after", step))


def test_a_world_of_one_needs_no_job():
    assert not torch.distributed.is_initialized()
    coordinator = DistCoordinator()
    coordinator.block_all()
    assert (coordinator.rank, coordinator.world_size) == (0, 1)
