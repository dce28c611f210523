import torch

from hybridpp.estimate import AllocationLog


def test_what_is_alive_is_counted_with_its_peak():
    with AllocationLog() as log:
        first = torch.zeros(100)
        second = first + 1
        assert log.now == 800
        view = second[:5]
        del first, second
        assert log.now == 400
        del view
        assert (log.now, log.peak) == (0, 800)
    born_and_died = [(one.size, one.born, one.died) for one in log.allocations]
    assert born_and_died == [(400, 1, 3), (400, 2, 4)]


def test_what_autograd_saves_is_noted_and_freed_behind_the_backward_pass():
    weight = torch.ones(10, requires_grad=True)
    with AllocationLog() as log, log.noting_saved():
        result = (weight * 2).exp().sum()
        saved = [one for one in log.allocations if one.savers]
        assert [one.size for one in saved] == [40]  # the result of exp
        result.backward()
        assert saved[0].died is not None


def test_tensors_that_come_from_outside_are_not_counted():
    outside = torch.zeros(100)
    with AllocationLog() as log:
        outside.add_(1)
        assert outside.view(10, 10).t() is not None
        assert torch.zeros(5, device="meta") is not None
    assert log.allocations == []


def test_a_storage_that_is_freed_by_hand_counts_no_more():
    with AllocationLog() as log:
        tensor = torch.zeros(100)
        log.resized(tensor.untyped_storage(), 0)
        assert log.now == 0
        log.resized(tensor.untyped_storage(), 400)
        assert log.now == 400
