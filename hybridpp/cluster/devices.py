"""Which CUDA device each rank of a job computes on, and the backend that follows from it."""

import contextlib
import socket
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from hybridpp.cluster.rendezvous import list_ranks
from hybridpp.errors import ConfigError

_MAX_LISTED = 4
_WAY_OUT = (
    "Start at most as many processes on a host as it has devices, and let each see a device of its own (srun "
    "--gpus-per-task=1) or all of them (then local_rank chooses)"
)


class RankDevice(NamedTuple):
    """The device of a rank.

    Attributes:
        host: name of its host.
        machine: the same for all containers of a host, and for no other host.
        hardware: the device there, whatever its index in this process; empty: there is none.
    """

    host: str
    machine: str
    hardware: str


def default_device() -> torch.device:
    """The current CUDA device if there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def device_for(local_rank: int) -> torch.device | None:
    """The CUDA device of a rank of a host: the only visible one, or the one that its number chooses; None: no device.

    With fewer devices than ranks, several ranks get one device.
    """
    return torch.device("cuda", local_rank % torch.cuda.device_count()) if torch.cuda.is_available() else None


def identify(device: torch.device | None) -> RankDevice:
    """Which device this is, in a form that ranks can compare."""
    machine = host = socket.gethostname()
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        machine = file.read().strip()
    return RankDevice(host, machine, _hardware(device) if device is not None else "")


def _hardware(device: torch.device) -> str:
    properties = torch.cuda.get_device_properties(device)
    uuid = str(getattr(properties, "uuid", ""))
    # Some drivers in virtual machines report zeros.
    if uuid.strip("0-"):
        return f"GPU-{uuid}"
    pci_ids = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None not in pci_ids:
        return "PCI " + ":".join(f"{number:02x}" for number in pci_ids)
    # Two processes that see one device each have the same index. They count as sharing it, which is safe.
    return str(device)


def choose_backend(asked: str | None, devices: Sequence[RankDevice]) -> str:
    """The backend of a job.

    Args:
        asked: ``"nccl"``, ``"gloo"``, or None: nccl where every rank has a device of its own.
        devices: of all ranks, in order.

    Raises:
        ConfigError: nccl is asked for, and two ranks share a device or a rank has none.
    """
    if asked is None:
        is_possible = dist.is_nccl_available() and all(device.hardware for device in devices)
        return "nccl" if is_possible and not conflicts(devices) else "gloo"
    if asked == "nccl" and (found := conflicts(devices)):
        raise ConfigError(
            f"nccl needs a CUDA device for every rank, of its own: {found}. {_WAY_OUT}; or use backend='gloo', which "
            "copies through host memory."
        )
    return asked


def warning_about(backend: str, asked: str | None, devices: Sequence[RankDevice]) -> str:
    """What rank 0 says about a backend that was chosen; empty: nothing.

    Args:
        backend: from :func:`choose_backend`.
        asked, devices: as there.
    """
    if asked is not None or backend == "nccl" or not any(device.hardware for device in devices):
        return ""
    found = conflicts(devices)
    if not found:
        return (
            "gloo copies the messages of CUDA devices through host memory: this build of torch has no NCCL. Install "
            "one that has it, or pass backend='gloo'."
        )
    return f"gloo copies the messages of CUDA devices through host memory: {found}. {_WAY_OUT}; or pass backend='gloo'."


def conflicts(devices: Sequence[RankDevice]) -> str:
    """Which ranks share a device and which have none; empty: every rank has its own."""
    owners: dict[tuple[str, str], list[int]] = {}
    without = []
    for rank, device in enumerate(devices):
        if device.hardware:
            owners.setdefault((device.machine, device.hardware), []).append(rank)
        else:
            without.append(rank)
    found = [
        f"{list_ranks(ranks)} share {devices[ranks[0]].hardware} of host {devices[ranks[0]].host}"
        for ranks in owners.values()
        if len(ranks) > 1
    ]
    if len(found) > _MAX_LISTED:
        found[_MAX_LISTED:] = [f"{len(found) - _MAX_LISTED} more devices are shared"]
    if without:
        found.append(f"{list_ranks(without)} {'have' if len(without) > 1 else 'has'} none")
    return ", ".join(found)
