"""Groups of processes that share memory, or do not."""

import contextlib
import errno
import gc
import os
import platform
import re
import resource
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from networks import squares
from processes import run_ranks
from support import boosted, sgd
from torch import nn
from two_hosts import hosts_or_skip, on_hosts

from hybridpp.cluster import current_world
from hybridpp.cluster.launch import shared_memory_wanted
from hybridpp.cluster.shared_memory import socket_rendezvous, why_impossible
from hybridpp.cluster.shared_memory.arena import ARENA_BYTES
from hybridpp.cluster.torch_group import TorchGroup
from hybridpp.cluster.torch_world import TorchWorld

# The package's name of that name is the function.
connect = sys.modules["hybridpp.cluster.shared_memory.connect"]


def _sums():
    world = current_world()
    group = world.split([list(range(world.size))])
    assert not group.overlaps, "what goes through shared memory, the rank carries itself"
    generator = torch.Generator().manual_seed(group.rank)
    sums = []
    for size in (1, 1000, 70_000):
        part = torch.randn(size, generator=generator)
        parts = torch.stack(group.all_gather(part))
        mine = group.reduce_scatter(parts, 0)
        group.all_reduce(part).wait()
        # From the first rank to the last, everywhere.
        assert torch.equal(part, (parts[0] + parts[1]) + parts[2])
        torch.testing.assert_close(mine[0], parts[group.rank] * 3)
        sums.append(part)
    return sums


def test_three_ranks_sum_to_the_same_bits():
    first, *others = run_ranks(_sums, 3)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def exchanged(group):
    """A sum, a message each way, and who is there: the same whatever carries it."""
    total, received = torch.arange(3.0) + group.rank, torch.zeros(2)
    group.all_reduce(total).wait()
    works = [group.receive(received, 1 - group.rank), group.send(torch.full((2,), float(group.rank)), 1 - group.rank)]
    for work in works:
        work.wait()
    return total.tolist(), received.tolist(), [part.item() for part in group.all_gather(torch.tensor(group.rank))]


EXCHANGED = [([1.0, 3.0, 5.0], [1.0, 1.0], [0, 1]), ([1.0, 3.0, 5.0], [0.0, 0.0], [0, 1])]


def own_descriptors():
    """Of links and of what they are made by; gloo's sockets are others."""
    unix = {f"socket:[{line.split()[6]}]" for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if "memfd:hybridpp" in target or "pidfd" in target or target in unix:
                found.add((descriptor, target))
    return found


def _with(fault, patience_s):
    """What is exchanged although ``fault(rank)`` was done to some rank, by what, what was logged, what leaked."""
    told = []
    for level in ("debug", "warning"):
        setattr(connect._LOGGER, level, lambda message, *args, level=level: told.append(f"{level}: {message % args}"))
    world = current_world()
    connect._PATIENCE_S = patience_s
    before, undo = own_descriptors(), None

    def make(*args):
        # gloo has made its group.
        nonlocal undo
        undo = fault(world.rank)
        return by_links(*args)

    by_links, torch_group = connect.connect, sys.modules[TorchGroup.__module__]
    torch_group.connect = make
    # Of a socket that was left to the garbage collector.
    sys.unraisablehook = lambda unraisable: told.append(repr(unraisable.exc_value))
    warnings.simplefilter("error")
    group = world.split([[0, 1]])
    if undo is not None:
        undo()
    gc.collect()
    return group.overlaps, exchanged(group), told, own_descriptors() - before


def assert_all_use_gloo(fault, *texts, patience_s=60.0):
    for rank, (by_gloo, result, told, leaked) in enumerate(run_ranks(lambda: _with(fault, patience_s), 2)):
        assert by_gloo
        assert result == EXCHANGED[rank]
        assert not leaked
        assert len(told) == 1
        assert re.search(texts[rank % len(texts)], told[0]), told


NOT_SHARED = r"^debug: ranks \[0, 1\] use gloo instead of shared memory: "
ON_RANK_1 = r"^warning: rank 1 could not share memory, so ranks \[0, 1\] use gloo: "


@pytest.mark.parametrize("chosen", [0, 1])
def test_where_one_rank_has_another_processor_or_host_all_use_gloo(chosen):
    def other_processor(rank):
        if rank == chosen:
            connect._is_possible = lambda: False

    def other_host(rank):
        if rank == chosen:
            socket_rendezvous._host = lambda: ("elsewhere", 1, 1)

    assert_all_use_gloo(other_processor, rf"{NOT_SHARED}\[{chosen}\] of them cannot, or may not$")
    assert_all_use_gloo(other_host, rf"{NOT_SHARED}they are on several hosts$")


def _limited(kind, value):
    def limit(rank):
        if rank != 1:
            return None
        before = resource.getrlimit(kind)
        # What is mapped already (links of all ranks, say) counts as well.
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(kind, (value + (mapped if kind == resource.RLIMIT_AS else 0), before[1]))
        return lambda: resource.setrlimit(kind, before)

    return limit


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        (
            resource.RLIMIT_NOFILE,
            3,
            r"no descriptor left for memory that ranks of one host share: this process may have 3 ",
        ),
        (
            resource.RLIMIT_FSIZE,
            2**20,
            rf"File too large: {ARENA_BYTES} addresses are wanted for each other rank \(mem",
        ),
        (
            resource.RLIMIT_AS,
            ARENA_BYTES,
            rf"Cannot allocate memory: {ARENA_BYTES} addresses are wanted for each other ",
        ),
    ],
)
def test_if_one_rank_has_no_means_all_use_gloo_and_it_says_why(kind, value, text):
    on_rank_0 = rf"{NOT_SHARED}\[1\] of them cannot, or may not$"
    if kind != resource.RLIMIT_NOFILE:  # rank 1 may fail before rank 0 has all it needs of it, or only then
        on_rank_0 += r"|^warning: rank 0 could not share memory, .*rank 1 is gone"
    assert_all_use_gloo(_limited(kind, value), on_rank_0, ON_RANK_1 + text)


def test_if_one_rank_cannot_call_all_use_gloo_after_a_while():
    def fault(rank):
        if rank == 1:
            socket_rendezvous._connect_to = lambda address, rank: None

    texts = [rf"^warning: rank {rank} could not .*: ranks \[{1 - rank}\] .* not reached" for rank in (0, 1)]
    assert_all_use_gloo(fault, *texts, patience_s=1.0)


def _switched(values: list[str]):
    os.environ["HYBRIDPP_SHARED_MEMORY"] = values[dist.get_rank()]
    group = TorchWorld(shared_memory_wanted()).split([[0, 1]])
    return group.overlaps, exchanged(group)


@pytest.mark.parametrize("values", ["00", "01", "10", "11"])
def test_results_are_the_same_with_shared_memory_switched_off_on_any_rank(values):
    by_gloo = values != "11"
    assert run_ranks(lambda: _switched(values), 2) == [(by_gloo, result) for result in EXCHANGED]


def _run_ahead(count, size):
    """Every rank sends to every other far more than is read, sums what gloo carries, and reads at last."""
    world = current_world()
    group = world.split([list(range(world.size))])
    assert not group.overlaps
    peers = [peer for peer in range(world.size) if peer != group.rank]
    sums = [torch.full((size,), float(group.rank)) for _ in range(count)]
    for number in range(count):
        for peer in peers:
            group.send(torch.full((size,), float(number)), peer)
    large = torch.ones(2**20)
    group.all_reduce(large).wait()
    works = [group.all_reduce(tensor) for tensor in sums]
    for number in range(count):
        for peer in peers:
            received = torch.empty(size)
            group.receive(received, peer).wait()
            assert received[0] == received[-1] == number
    for work in reversed(works):
        work.wait()
    return large[0].item(), {tensor[-1].item() for tensor in sums}


@pytest.mark.covering
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize(("count", "size"), [(300, 1), (10, 60_000)])
def test_ranks_that_all_run_ahead_do_not_wait_for_each_other(num_ranks, count, size):
    total = sum(range(num_ranks))
    assert run_ranks(lambda: _run_ahead(count, size), num_ranks) == [(num_ranks, {total})] * num_ranks


def _drop():
    """What the garbage collector warns of when a group is forgotten; what it had open, and what of that still is."""
    warned = []
    sys.unraisablehook = lambda unraisable: warned.append(repr(unraisable.exc_value))
    warnings.simplefilter("error")
    before = own_descriptors()
    # The world keeps those that it makes.
    group = TorchGroup(dist.new_group([0, 1]))
    exchanged(group)
    own = own_descriptors() - before
    del group
    gc.collect()
    return warned, len(own), len(own & own_descriptors())


def test_a_group_that_is_forgotten_is_closed_without_a_warning():
    # The connection, the peer's process, the memory.
    assert run_ranks(_drop, 2) == [([], 3, 0)] * 2


class Many(nn.Module):
    """More parameters, each too large to share a bucket, than a socket takes unread messages."""

    def __init__(self):
        super().__init__()
        self.factors = nn.ParameterList(torch.full((3,), 1 + number / 1000) for number in range(300))

    def forward(self, x):
        return x * torch.stack(list(self.factors)).mean(0)


def _train_many():
    booster, model, optimizer = boosted(Many(), sgd, torch.ones(4, 3), ddp_bucket_cap_mb=1e-5)
    rank = current_world().rank
    batches = [torch.randn(4, 3, generator=torch.Generator().manual_seed(2 * step + rank)) for step in range(2)]
    data = iter(batches)
    for _ in batches:
        booster.execute_pipeline(data, model, squares, optimizer)
        optimizer.step()
    return torch.stack(list(model.factors)).detach()


def test_one_bucket_per_parameter_trains_with_and_without_shared_memory(monkeypatch):
    shared = run_ranks(_train_many, 2)
    monkeypatch.setenv("HYBRIDPP_SHARED_MEMORY", "0")
    for result in (*shared, *run_ranks(_train_many, 2)):
        assert torch.equal(result, shared[0])


@pytest.mark.timeout(120)
def test_copies_of_a_virtual_machine_of_one_boot_id_use_gloo_at_once():
    def copies():
        told = []
        connect._LOGGER.debug = connect._LOGGER.warning = lambda message, *args: told.append(message % args)
        socket_rendezvous._host = lambda: ("one boot", 1, 1)
        # Whoever waits for calls that cannot come waits for longer than this test.
        connect._PATIENCE_S = 1000.0
        group = current_world().split([[0, 1]])
        return group.overlaps, exchanged(group), told

    with hosts_or_skip() as hosts:
        found = run_ranks(copies, 2, **on_hosts(hosts))
    text = "ranks [0, 1] use gloo: their hosts have one boot id, as copies of a virtual machine"
    assert found == [(True, EXCHANGED[rank], [text]) for rank in range(2)]


def test_why_memory_cannot_be_shared_is_said(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert why_impossible() == "links are for x86_64, and this processor is aarch64"
    monkeypatch.delattr(os, "memfd_create", raising=False)
    assert why_impossible() == "the system has no memfd_create"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="links are for x86_64")
def test_memory_that_can_be_shared_is_given_back():
    before = set(os.listdir("/proc/self/fd"))
    assert why_impossible() == ""
    assert not set(os.listdir("/proc/self/fd")) - before


@pytest.mark.skipif(platform.machine() != "x86_64", reason="links are for x86_64")
def test_a_limit_of_addresses_is_why(monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(connect, "map_memory", full)
    assert "Raise `ulimit -f` and `ulimit -v`" in why_impossible()
