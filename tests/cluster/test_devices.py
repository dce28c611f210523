"""Which backend ranks take, by the devices that they would use; hosts and devices are made up."""

import logging
import re
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from hybridpp.cluster import Loopback, current_world, devices, rendezvous
from hybridpp.cluster.devices import RankDevice, choose_backend, conflicts, default_device, device_for, identify
from hybridpp.cluster.join import JoinOptions, ProcessRank, _choose, join_job
from hybridpp.cluster.rendezvous import Entry, StoreAddress
from hybridpp.errors import ConfigError


class Cuda:
    """Makes this host one with CUDA devices."""

    def __init__(self, patch):
        self.current = 0
        patch.setattr(torch.cuda, "current_device", lambda: self.current)
        patch.setattr(torch.cuda, "set_device", lambda device: setattr(self, "current", device.index))
        patch.setattr(torch.cuda, "get_device_properties", lambda device: self.devices[device.index])
        patch.setattr(torch.cuda, "is_available", lambda: bool(self.devices))
        patch.setattr(torch.cuda, "device_count", lambda: len(self.devices))
        patch.setattr(dist, "is_nccl_available", lambda: True)
        self.devices = []

    def shows(self, *uuids):
        """What this process sees from now on."""
        self.devices = [SimpleNamespace(uuid=uuid) for uuid in uuids]


@pytest.fixture
def cuda(monkeypatch):
    return Cuda(monkeypatch)


@pytest.fixture
def one_store(monkeypatch):
    """All ranks meet in one store of this process."""
    store = HashStore()
    monkeypatch.setattr(StoreAddress, "open", lambda *_: store)


def job(cuda, *ranks, machine="m"):
    """The devices of ranks that see these devices each and have these local ranks."""
    found = []
    for local_rank, uuids in ranks:
        cuda.shows(*uuids)
        found.append(identify(device_for(local_rank))._replace(host="h", machine=machine))
    return found


SHARED = "ranks 0, 1 share GPU-a of host h"
LAYOUTS = {
    "each process sees its own": ([(0, "a"), (1, "b"), (2, "c")], "nccl", ""),
    "all processes see all": ([(0, "abc"), (1, "abc"), (2, "abc")], "nccl", ""),
    "the same in another order": ([(0, "ab"), (1, "ba")], "gloo", SHARED),
    "more processes than devices": ([(0, "ab"), (1, "ab"), (2, "ab"), (3, "ab")], "gloo", "ranks 0, 2 share GPU-a"),
    "one sees nothing": ([(0, "a"), (1, "")], "gloo", "rank 1 has none"),
    "two see one device": ([(0, "a"), (1, "a"), (2, "")], "gloo", f"{SHARED}, rank 2 has none"),
    "a host without devices": ([(0, ""), (1, "")], "gloo", "ranks 0, 1 have none"),
    "one process": ([(0, "ab")], "nccl", ""),
}


@pytest.mark.parametrize(("ranks", "backend", "found"), LAYOUTS.values(), ids=LAYOUTS)
def test_nccl_is_taken_where_every_rank_has_a_device_of_its_own(cuda, ranks, backend, found):
    seen = job(cuda, *ranks)
    assert choose_backend(None, seen) == backend
    assert conflicts(seen).startswith(found)
    assert choose_backend("gloo", seen) == "gloo"
    if backend == "nccl":
        assert choose_backend("nccl", seen) == "nccl"
        return
    text = f"nccl needs a CUDA device for every rank, of its own: {conflicts(seen)}. Start at most as many processes"
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}.* or use backend='gloo', which copies"):
        choose_backend("nccl", seen)


def test_a_device_is_one_of_its_host_whatever_the_containers_name(cuda):
    first, second = (job(cuda, (0, ["0000-00"]), machine=machine)[0] for machine in "xy")
    assert first.hardware == second.hardware == "cuda:0", "there is no UUID, nor a place on a bus"
    assert conflicts([first, second]) == ""
    assert conflicts([first, first._replace(host="container")]) == "ranks 0, 1 share cuda:0 of host h"


def test_a_device_without_a_uuid_is_known_by_its_place_on_the_bus(cuda):
    place = {"pci_domain_id": 0, "pci_bus_id": 0x3B, "pci_device_id": 1}
    cuda.devices = [SimpleNamespace(**place), SimpleNamespace(uuid="00-00", **place)]
    assert [identify(device_for(rank)).hardware for rank in (0, 1)] == ["PCI 00:3b:01"] * 2
    cuda.shows("", "")
    assert [identify(device_for(rank)).hardware for rank in (0, 1)] == ["cuda:0", "cuda:1"]


def test_many_shared_devices_are_counted():
    seen = [RankDevice("h", "m", f"GPU-{rank // 2}") for rank in range(20)]
    assert conflicts(seen).endswith("ranks 6, 7 share GPU-3 of host h, 6 more devices are shared")


def launched(ranks, asked):
    """What each rank gets from the rendezvous: the backend, or the text of its error."""
    results = [None] * len(ranks)

    def work(rank):
        try:
            entry = Entry(settings={"seed": 1}, own=ranks[rank], decide=lambda own: _choose(asked, own))
            results[rank] = rendezvous.wait_for_ranks(StoreAddress("", 1), rank, len(ranks), entry, 5.0)[1]
        except ConfigError as error:
            results[rank] = str(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def test_all_ranks_get_what_rank_0_chose(cuda, one_store, caplog):
    assert launched(job(cuda, (0, "a"), (1, "b"), (2, "c")), None) == ["nccl"] * 3
    assert not caplog.messages


def test_nccl_is_refused_on_every_rank(cuda, one_store):
    first, *others = launched(job(cuda, (0, "a"), (1, "a"), (2, "b")), "nccl")
    assert f"of its own: {SHARED}. Start at most" in first
    assert others == [first] * 2


def test_rank_0_warns_once_where_devices_lie_idle(cuda, one_store, caplog):
    caplog.set_level(logging.WARNING, logger="hybridpp")
    seen = job(cuda, (0, "a"), (1, "a"), (2, ""))
    assert launched(seen, None) == ["gloo"] * 3
    (text,) = caplog.messages
    start = f"[rank 0] gloo copies the messages of CUDA devices through host memory: {SHARED}, rank 2 has none. Start"
    assert text.startswith(start)
    assert text.endswith("or pass backend='gloo'.")
    caplog.clear()
    assert launched(seen, "gloo") == ["gloo"] * 3
    assert launched(job(cuda, (0, ""), (1, "")), None) == ["gloo"] * 2
    assert not caplog.messages, "as asked for, or on a host without devices"


def test_a_torch_without_nccl_takes_gloo_and_says_why(cuda, monkeypatch, caplog):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert _choose(None, job(cuda, (0, "a"))) == "gloo"
    assert "this build of torch has no NCCL. Install one that has it" in caplog.messages[0]
    with pytest.raises(ConfigError, match=r"^this build of torch has no NCCL\. Use backend='gloo', or install"):
        join_job(StoreAddress("127.0.0.1", 1), ProcessRank(0, 1, 0), JoinOptions(backend="nccl", timeout_s=1.0))


class Connected(Exception):
    """The job is about to be connected."""


@pytest.mark.parametrize(
    ("uuids", "local_rank", "current"), [("a", 0, 0), ("a", 5, 0), ("abcdefgh", 5, 5), ("ab", 5, 1)]
)
def test_a_rank_uses_the_device_it_sees_or_that_of_its_local_rank(
    cuda, one_store, monkeypatch, uuids, local_rank, current
):
    cuda.shows(*uuids)
    connecting = []

    def connect(backend, **_):
        connecting.append(backend)
        raise Connected

    monkeypatch.setattr(dist, "init_process_group", connect)
    with pytest.raises(Connected):
        join_job(StoreAddress("", 1), ProcessRank(0, 1, local_rank), JoinOptions(timeout_s=5.0))
    assert (connecting, cuda.current) == (["nccl"], current)


def test_a_script_without_launch_computes_on_the_device(cuda):
    world = current_world()
    assert (world.device, world.size) == (torch.device("cpu"), 1)
    cuda.shows("a", "b")
    cuda.current = 1
    assert current_world().device == default_device() == torch.device("cuda", 1)
    assert Loopback(2).run(lambda: current_world().device) == [torch.device("cpu")] * 2


def test_asking_for_the_world_does_not_start_cuda(cuda, monkeypatch):
    cuda.shows("a")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("this makes a context on the device"))
    assert current_world().rank == 0


def test_a_host_has_one_identity(monkeypatch):
    assert identify(None) == identify(None)
    monkeypatch.setattr(devices.socket, "gethostname", lambda: "container")
    assert identify(None).host == "container"
