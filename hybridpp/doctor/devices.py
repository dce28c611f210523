"""The CUDA devices that this process sees, and what they reach without the host."""

import warnings
from dataclasses import dataclass

import torch

from hybridpp.cluster.devices import identify


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """A CUDA device.

    Attributes:
        name: of the model.
        hardware: its UUID, the same in every process.
        memory_bytes: in all.
        capability: compute capability, as in "9.0".
        peers: indices of the devices whose memory it reads without the host (NVLink, or PCIe).
    """

    name: str
    hardware: str
    memory_bytes: int
    capability: str
    peers: tuple[int, ...]


def visible_devices() -> tuple[list[DeviceFacts], str]:
    """The devices, and why torch finds none although it was built for CUDA (empty: it finds some, or says nothing)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        is_available = torch.cuda.is_available()
    if not is_available:
        return [], " ".join(str(one.message).splitlines()[0] for one in caught)
    count = torch.cuda.device_count()
    return [_facts(index, count) for index in range(count)], ""


def _facts(index: int, count: int) -> DeviceFacts:
    device = torch.device("cuda", index)
    properties = torch.cuda.get_device_properties(device)
    others = [other for other in range(count) if other != index]
    return DeviceFacts(
        name=properties.name,
        hardware=identify(device).hardware,
        memory_bytes=properties.total_memory,
        capability=f"{properties.major}.{properties.minor}",
        peers=tuple(other for other in others if torch.cuda.can_device_access_peer(index, other)),
    )
