import threading
import time
from datetime import timedelta
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hybridpp_plugins.layout import Layout
from processes import run_ranks
from torch._subclasses.fake_tensor import FakeTensorMode

from hybridpp.cluster import DistCoordinator, Loopback, RankGrid, current_world
from hybridpp.cluster.patient_store import SilentStoreError
from hybridpp.cluster.torch_world import TorchWorld, connected
from hybridpp.errors import PartitionError

HALF = (torch.float16, torch.bfloat16)


def exercise():
    """The same on every kind of world: everything that a group can do."""
    world = current_world()
    alone, pair = world.split([[0], [1]]), world.split([[1, 0]])
    total = torch.tensor([1.0 + world.rank, 5.0])
    pair.all_reduce(total).wait()
    alone.all_reduce(torch.ones(1)).wait()
    # Several under way at once, large and small.
    summed = [torch.full((size,), size + world.rank / 4) for size in (3, 600_000, 5)]
    for work in reversed([pair.all_reduce(tensor) for tensor in summed]):
        work.wait()
    gathered = pair.all_gather(torch.tensor([world.rank], dtype=torch.float64))
    column = torch.arange(4.0).reshape(2, 2).t() + 10 * world.rank  # not contiguous
    along = [pair.all_gather_along(column, dim) for dim in (0, 1)]
    scattered = [pair.reduce_scatter(column, dim) for dim in (0, 1)]
    half = [pair.reduce_scatter(torch.full((2, 1), 1.5 + world.rank, dtype=dtype), 0) for dtype in HALF]
    parts = torch.arange(4.0) + 10 * world.rank
    started = [pair.start_reduce_scatter(parts, 0), pair.start_all_gather(parts), pair.start_reduce_scatter(parts, 0)]
    results = [torch.stack(started.pop(1).wait()).tolist(), *(pending.wait().tolist() for pending in started)]
    peer = 1 - pair.rank
    received = [torch.zeros(3, dtype=torch.bfloat16), torch.zeros(())]
    works = [pair.receive(tensor, peer) for tensor in received]
    works += [pair.send(torch.full((3,), world.rank, dtype=torch.bfloat16), peer)]
    works += [pair.send(torch.tensor(10.0 + world.rank), peer)]
    for work in works:
        work.wait()
    return {
        "world": (world.rank, world.size),
        "groups": [(group.ranks, group.rank, group.size) for group in (alone, pair, world.control())],
        "none": world.split([[0]]) is None,
        "sum": total.tolist(),
        "sums": [tensor.unique().tolist() for tensor in summed],
        "gathered": [part.tolist() for part in gathered],
        "along": [part.tolist() for part in along],
        "scattered": [(part.tolist(), part.is_contiguous()) for part in scattered],
        "started": results,
        "half": [(part.tolist(), part.dtype) for part in half],
        "unchanged": column.tolist(),
        "received": [tensor.tolist() for tensor in received],
        "control": [part.item() for part in world.control().all_gather(torch.tensor(world.rank))],
    }


def on_processes():
    seen = exercise()
    assert current_world().control().process_group is not None
    coordinator = DistCoordinator()
    coordinator.block_all()
    with coordinator.priority_execution(executor_rank=1):
        if coordinator.rank == 1:
            time.sleep(0.05)
        # The machine's clock is the same for both processes.
        seen["entered"] = time.monotonic()
    seen["coordinator"] = (coordinator.rank, coordinator.world_size, coordinator.is_master())
    return seen


def test_processes_and_in_process_ranks_communicate_alike():
    processes = run_ranks(on_processes, 2)
    late, early = (rank.pop("entered") for rank in processes)
    assert early < late
    assert [rank.pop("coordinator") for rank in processes] == [(0, 2, True), (1, 2, False)]
    assert processes == Loopback(2).run(exercise)
    assert processes[0] == {
        "world": (0, 2),
        "groups": [((0,), 0, 1), ((0, 1), 0, 2), ((0, 1), 0, 2)],
        "none": False,
        "sum": [3.0, 10.0],
        "sums": [[6.25], [1_200_000.25], [10.25]],
        "gathered": [[0.0], [1.0]],
        "along": [[[0, 2], [1, 3], [10, 12], [11, 13]], [[0, 2, 10, 12], [1, 3, 11, 13]]],
        "scattered": [([[10, 14]], True), ([[10], [12]], True)],
        "started": [[[0, 1, 2, 3], [10, 11, 12, 13]], [10, 12], [10, 12]],
        "half": [([[4.0]], dtype) for dtype in HALF],
        "unchanged": [[0, 2], [1, 3]],
        "received": [[1.0, 1.0, 1.0], 11.0],
        "control": [0, 1],
    }


def fakes_on_ranks():
    """What each way to communicate says to a tensor without data, on every rank; then they communicate on."""
    world = current_world()
    pair = world.split([[0, 1]])
    fakes = [FakeTensorMode().from_tensor(torch.ones(2, 2)), torch.ones(2, 2, device="meta")]
    ways = [pair.all_reduce, pair.all_gather, pair.start_all_gather]
    ways += [lambda x: pair.all_gather_along(x, 0), lambda x: pair.reduce_scatter(x, 0)]
    ways += [lambda x: pair.send(x, 1 - pair.rank), lambda x: pair.receive(x, 1 - pair.rank)]
    said = []
    for fake, way in product(fakes, ways):
        with pytest.raises(PartitionError, match="a tensor without data cannot be communicated") as raised:
            way(fake)
        said.append(str(raised.value))
    mine = torch.ones(2)
    pair.all_reduce(mine).wait()
    return said, mine.tolist()


@pytest.mark.parametrize("run", [lambda: Loopback(2).run(fakes_on_ranks), lambda: run_ranks(fakes_on_ranks, 2)])
def test_tensors_without_numbers_are_refused_and_nothing_is_sent(run):
    for said, total in run():
        assert len(said) == 14
        assert "got a FakeTensor of shape (2, 2)" in said[0]
        assert total == [2.0, 2.0]


def test_a_job_that_the_script_joined_by_itself_is_a_world(tmp_path):
    def run():
        rank = dist.get_rank()
        DistCoordinator().destroy()
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=2)
        first, second = (current_world().split([[0, 1]], name) for name in ("first", "second"))
        total = torch.ones(1)
        first.all_reduce(total).wait()
        # By hand, without the coordinator.
        dist.destroy_process_group()
        return total.item(), current_world().size, second.ranks

    assert run_ranks(run, 2) == [(2.0, 1, (0, 1))] * 2


class NcclOptions:
    """As torch has them in builds with NCCL."""

    def __init__(self, is_high_priority_stream):
        self.is_high_priority_stream, self.config = is_high_priority_stream, SimpleNamespace(max_ctas=None)


def groups_of_a_pipeline():
    """What is asked of torch for each group: description, time limit, and the options of NCCL."""
    asked = []
    new_group = dist.new_group

    def recorded(*args, pg_options=None, **options):
        told = pg_options and (pg_options.is_high_priority_stream, pg_options.config.max_ctas, pg_options._timeout)
        asked.append((options["group_desc"], options["timeout"].total_seconds(), told))
        return new_group(*args, **options)

    dist.new_group = recorded
    world = current_world()
    grid = RankGrid(dp_size=1, pp_size=2, tp_size=1)
    Layout.create(world, grid)
    on_gloo = list(asked)
    asked.clear()
    dist.get_backend_config, dist.ProcessGroupNCCL = lambda: "cpu:gloo,cuda:nccl", SimpleNamespace(Options=NcclOptions)
    world._groups.clear(), world._users.clear()
    Layout.create(world, grid)
    return on_gloo, asked


def test_a_pipelines_messages_go_first_and_take_few_multiprocessors():
    (on_gloo, on_nccl), other = run_ranks(groups_of_a_pipeline, 2)
    assert other == (on_gloo, on_nccl)
    assert on_gloo == [("hybridpp pp", 30.0, None)]
    assert on_nccl == [("hybridpp pp", 30.0, (True, 4, timedelta(seconds=30)))]


def carried():
    world, config = current_world(), dist.get_backend_config
    found = [[world.carries(torch.device(kind)) for kind in ("cpu", "cuda")]]
    try:
        for backends in ("cuda:nccl", "cpu:gloo,cuda:nccl"):
            dist.get_backend_config = lambda group, backends=backends: backends
            found.append([world.carries(torch.device(kind)) for kind in ("cpu", "cuda")])
    finally:
        dist.get_backend_config = config
    return found


def test_nccl_carries_tensors_of_cuda_devices_only():
    assert run_ranks(carried, 2) == [[[True, True], [False, True], [True, True]]] * 2
    assert run_ranks(carried, 1) == [[[True, True]] * 3]


def a_script_bound_its_group():
    """How a world finds what ``init_process_group(device_id=...)`` did: torch then splits one communicator for all."""
    world = TorchWorld()
    single = world.split([[0]])
    descriptions = {group.group_desc for group in dist.distributed_c10d._world.pg_map}
    before = world.device
    world.process_group = SimpleNamespace(bound_device_id=torch.device("cuda", 3))
    return single is None, world._alone is None, sorted(descriptions), str(before), str(world.device)


def test_a_default_group_that_is_bound_to_a_device_sets_the_device():
    first, second = run_ranks(a_script_bound_its_group, 2)
    assert first == (False, False, ["default_pg", "hybridpp one rank"], "cpu", "cuda:3")
    assert second == (True, False, *first[2:]), "a group of some ranks is made by all of them"


def test_ranks_that_connect_over_a_store_that_is_cut_off_give_up(monkeypatch):
    monkeypatch.setattr("hybridpp.cluster.torch_world.PATIENCE_S", 0.05)
    with pytest.raises(SilentStoreError, match=r"has not answered for 0\.1 s"):
        connected(threading.Event().wait, timedelta(seconds=0.05))
    assert connected(lambda: 3, timedelta(seconds=30)) == 3
