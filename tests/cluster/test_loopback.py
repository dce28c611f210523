import gc
import weakref

import pytest
import torch

from hybridpp.cluster import Loopback, current_world


def test_alone_there_is_a_world_of_one():
    world = current_world()
    assert (world.rank, world.size, world.device.type) == (0, 1, "cpu")
    total = torch.ones(2)
    world.control().all_reduce(total).wait()
    assert total.tolist() == [1, 1]


def test_a_rank_outside_all_groups_has_none():
    assert Loopback(2).run(lambda: current_world().split([[1]]) is None) == [True, False]


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


def test_the_world_inside_is_gone_outside():
    Loopback(3).run(lambda: None)
    assert current_world().size == 1
