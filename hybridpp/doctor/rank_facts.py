"""Facts of every rank of a job, and the backend that follows from them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hybridpp.cluster import World, environment_of_jobs, gather_objects
from hybridpp.cluster.devices import RankDevice, choose_backend, conflicts, device_for, identify
from hybridpp.doctor.devices import DeviceFacts, visible_devices
from hybridpp.doctor.host import HostFacts, host_facts
from hybridpp.doctor.packages import build_versions, package_versions, torchvision_error


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What a job depends on, of one rank.

    Attributes:
        rank: in the job.
        local_rank: among those of its host.
        machine: the same for all containers of a host, and for no other host.
        hardware: the device that this rank computes on; empty: the CPU.
        versions: of packages, by name.
        builds: see :func:`~hybridpp.doctor.packages.build_versions`.
        location: folder of the hybridpp that is imported.
        host: of the rank.
        devices: that its process sees.
        no_device: why torch finds no device, if it says so.
        torchvision: why it cannot be imported; empty: it can, or is not there.
        num_threads: that torch computes with.
        environment: variables that change how a job runs.
    """

    rank: int
    local_rank: int
    machine: str
    hardware: str
    versions: Mapping[str, str]
    builds: Mapping[str, str]
    location: str
    host: HostFacts
    devices: Sequence[DeviceFacts]
    no_device: str
    torchvision: str
    num_threads: int
    environment: Mapping[str, str]

    @property
    def host_id(self) -> str:
        """The same for ranks of one host; copies of a virtual machine may have one ``machine``, and other names."""
        return f"{self.machine} {self.host.name}"


def all_facts(world: World) -> list[RankFacts]:
    """Of all ranks, in order, on every rank. Collective: all ranks of ``world``."""
    own = asdict(_own_facts(world))
    if world.size == 1:
        return [facts_from_plain(own)]
    return [facts_from_plain(one) for one in gather_objects(world.control(), "in hybridpp doctor", own)]


def backend_choice(facts: Sequence[RankFacts]) -> tuple[str, str]:
    """The backend that a job would take by itself, and why.

    Args:
        facts: of all ranks; of one: a job with a rank for each device that it sees is meant.
    """
    if len(facts) == 1:
        first = facts[0]
        ranks = [RankDevice(first.host.name, first.machine, device.hardware) for device in first.devices]
    else:
        ranks = [RankDevice(one.host.name, one.machine, one.hardware) for one in facts]
    if not any(rank.hardware for rank in ranks):
        return "gloo", "there is no CUDA device"
    backend = choose_backend(None, ranks)
    if backend == "nccl":
        return backend, "every rank has a CUDA device of its own"
    return backend, conflicts(ranks) or "this build of torch has no NCCL"


def _own_facts(world: World) -> RankFacts:
    devices, no_device = visible_devices()
    identity = identify(device_for(world.local_rank))
    return RankFacts(
        rank=world.rank,
        local_rank=world.local_rank,
        machine=identity.machine,
        hardware=identity.hardware,
        versions=package_versions(),
        builds=build_versions(),
        location=str(Path(__file__).parents[1]),
        host=host_facts(),
        devices=devices,
        no_device=no_device,
        torchvision=torchvision_error(),
        num_threads=torch.get_num_threads(),
        environment=environment_of_jobs(),
    )


def facts_from_plain(plain: dict[str, Any]) -> RankFacts:
    """What ``dataclasses.asdict`` and JSON have made plain."""
    host = {**plain["host"], "addresses": tuple(plain["host"]["addresses"])}
    host["open_files"] = tuple(host["open_files"])
    devices = [DeviceFacts(**{**device, "peers": tuple(device["peers"])}) for device in plain["devices"]]
    return RankFacts(**{**plain, "host": HostFacts(**host), "devices": devices})
