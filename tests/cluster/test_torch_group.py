"""Device memory over a backend that only knows host memory; the CPU plays the device."""

import time
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from processes import run_ranks
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from hybridpp.cluster import current_world, torch_group
from hybridpp.cluster.torch_group import TorchGroup
from hybridpp.errors import PeerTimeoutError
from hybridpp.estimate import AllocationLog


def _exchange():
    world = current_world()
    group = world.split([[0, 1]])
    group._staged = lambda tensor: True
    other = 1 - group.rank
    mine = torch.full((3,), float(group.rank + 1))
    theirs = torch.zeros(3)
    receiving = group.receive(theirs, other)
    group.send(mine, other).wait()
    receiving.wait()
    total = mine.clone()
    work = group.all_reduce(total)
    work.wait()
    assert group.all_gather_along(mine, 0).tolist() == [1.0] * 3 + [2.0] * 3
    assert group.reduce_scatter(torch.arange(4.0), 0).tolist() == [[0.0, 2.0], [4.0, 6.0]][group.rank]
    return theirs.tolist(), total.tolist(), [part.tolist() for part in group.all_gather(mine)]


def test_what_arrives_on_the_host_is_copied_to_the_device():
    ones, twos = [1.0] * 3, [2.0] * 3
    assert run_ranks(_exchange, 2) == [(twos, [3.0] * 3, [ones, twos]), (ones, [3.0] * 3, [ones, twos])]


class Ops(TorchDispatchMode):
    """Notes copies of tensors, and communication."""

    COPIES = ("copy_", "_to_copy", "clone", "cat", "stack")

    def __init__(self):
        super().__init__()
        self.copied, self.allocated, self.communication = [], 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        namespace, name = func.name().split("::")
        name = name.split(".")[0]
        if namespace == "c10d":
            self.communication.append(name)
        if name in self.COPIES:
            self.copied.append(result.numel())
        if name in ("empty", "new_empty", "empty_like"):
            self.allocated += result.numel()
        return result


@contextmanager
def device_group(size):
    """A group whose backend reaches the tensors' memory, as NCCL does; nothing is sent."""
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield TorchGroup(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


COLLECTIVES = {
    "gather along 0": (lambda group, x: group.all_gather_along(x, 0), [], 4, "_allgather_base_"),
    "gather along 1": (lambda group, x: group.all_gather_along(x, 1), [4 * 64], 4, "_allgather_base_"),
    "gather along -2": (lambda group, x: group.all_gather_along(x, -2), [], 4, "_allgather_base_"),
    "gather parts": (lambda group, x: group.all_gather(x), [], 4, "_allgather_base_"),
    "scatter 0": (lambda group, x: group.reduce_scatter(x, 0), [], 1 / 4, "_reduce_scatter_base_"),
    "scatter 1": (lambda group, x: group.reduce_scatter(x, 1), [64], 1 / 4, "_reduce_scatter_base_"),
    "scatter segments": (lambda group, x: group.reduce_scatter_segments(x.view(-1)), [], 0, "_reduce_scatter_base_"),
    "gather segments": (lambda group, x: group.all_gather_segments(x.view(-1)), [], 0, "_allgather_base_"),
    "scatter a view": (lambda group, x: group.reduce_scatter(x.t(), 0), [64], 1 / 4, "_reduce_scatter_base_"),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_of_device_memory_copy_at_most_once(name, monkeypatch):
    collective, copied, allocated, operation = COLLECTIVES[name]
    monkeypatch.setattr(torch_group, "timeout_of", lambda group: timedelta(seconds=1))
    x = torch.arange(64.0).reshape(8, 8)
    with device_group(4) as group, Ops() as ops:
        collective(group, x)
    assert ops.communication == [operation]
    assert ops.copied == copied
    assert ops.allocated == allocated * 64


def _writes():
    group = current_world().split([[0, 1]])
    group._exchanging = lambda num_bytes: None
    weight = torch.ones(2, requires_grad=True)
    first, second = group.all_gather(torch.tensor([1.0, 2.0]) + group.rank)
    product = weight * first
    second.add_(1)
    product.sum().backward()
    wide = [part.tolist() for part in group.all_gather(torch.tensor([1, -1], dtype=torch.int16))]
    along = [group.all_gather_along(torch.arange(4.0).reshape(2, 2) + group.rank, dim).tolist() for dim in (0, 1, -1)]
    scalars = [part.item() for part in group.all_gather(torch.tensor(group.rank))]
    return weight.grad.tolist(), second.tolist(), wide, along, scalars


def test_parts_of_a_large_collective_can_be_written_to_one_by_one():
    columns = [[0, 1, 1, 2], [2, 3, 3, 4]]
    along = [[[0, 1], [2, 3], [1, 2], [3, 4]], columns, columns]
    assert run_ranks(_writes, 2) == [([1, 2], [3, 4], [[1, -1]] * 2, along, [0, 1])] * 2


def _segments():
    group = current_world().split([[0, 1]])
    found = []
    for shared, dtype in ((True, torch.float32), (False, torch.float32), (False, torch.bfloat16)):
        if not shared:
            group._exchanging = lambda num_bytes: None
        for on_device in (False, True):
            group._staged = lambda tensor, on_device=on_device: on_device
            flat = torch.nn.Parameter(torch.arange(4.0, dtype=dtype) + 10 * group.rank)
            group.reduce_scatter_segments(flat).wait()
            scattered = flat.tolist()
            group.all_gather_segments(flat).wait()
            found.append((scattered, flat.tolist()))
    return found


def test_segments_are_summed_and_gathered_in_place():
    whole = [10, 12, 14, 16]
    assert run_ranks(_segments, 2) == [[([10, 12, 2, 3], whole)] * 6, [([10, 11, 14, 16], whole)] * 6]


def _many_small(kind, num_elements):
    """The most that collectives of small tensors hold beside these, in bytes, and what comes of them."""
    group = current_world().split([[0, 1]])
    flats = [torch.full((num_elements,), float(group.rank + 1)) for _ in range(12)]
    with AllocationLog() as log:
        works = [getattr(group, kind)(flat) for flat in flats]
        for work in works:
            work.wait()
    assert group.num_collectives == 12
    return log.peak, [flat.view(2, -1)[group.rank].mean().item() for flat in flats], flats[0].mean().item()


@pytest.mark.parametrize(
    ("kind", "num_elements", "own", "whole"),
    [
        ("all_reduce", 2**19, 3.0, 3.0),
        ("reduce_scatter_segments", 2**20, 3.0, None),
        ("all_gather_segments", 2**20, None, 1.5),
    ],
)
def test_many_small_collectives_hold_little_memory(kind, num_elements, own, whole):
    for peak, means, mean in run_ranks(partial(_many_small, kind, num_elements), 2):
        # Five of 2 MiB, as one is received before the oldest one is waited for; a sum or a whole tensor beside them.
        assert peak <= 5 * 2**21 + 4 * num_elements, "without a limit it would be 12 of 2 MiB"
        assert own is None or means == [own] * 12
        assert whole is None or mean == whole


def _many_in_turn():
    group = current_world().split([[0, 1]])
    for _ in range(50):
        group.all_reduce(torch.ones(1)).wait()
    return len(group._small)


def test_collectives_that_were_waited_for_are_forgotten():
    assert run_ranks(_many_in_turn, 2) == [1, 1]


def _two_messages_that_do_not_come():
    group = current_world().split([[0, 1]])
    texts = []
    if group.rank == 0:
        waits = [group.receive(torch.zeros(3), 1) for _ in range(2)]
        for work in waits:
            with pytest.raises(PeerTimeoutError) as raised:
                work.wait()
            texts.append(str(raised.value))
    else:
        time.sleep(2.0)
    return texts


def test_a_wait_that_another_ones_timeout_ends_is_told_as_a_timeout(monkeypatch):
    monkeypatch.setenv("HYBRIDPP_SHARED_MEMORY", "0")
    texts, _ = run_ranks(_two_messages_that_do_not_come, 2, wait_s=1.0)
    assert all(text.startswith("rank 1 (group ") and "sent nothing for 1 s" in text for text in texts), texts
