"""Facts of the host that this process runs on. What a system does not tell is None."""

import contextlib
import os
import platform
import resource
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from hybridpp.cluster.shared_memory import why_impossible

_CGROUP = Path("/sys/fs/cgroup")
_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """What limits a rank on its host.

    Attributes:
        name: of the host.
        addresses: that its name resolves to; empty: it does not.
        interfaces: of its network, each with its IPv4 address ("" where it has none).
        system: kernel and machine.
        cores: that this process may use.
        cpu_quota: cores' worth of time that its container may use; None: no limit.
        memory_bytes: of the host.
        memory_limit_bytes: of its container; None: no limit.
        shm_bytes: size of /dev/shm; None: there is none.
        shm_free_bytes: of it.
        open_files: limit of this process, and what it may be raised to; -1: no limit.
        file_bytes: limit of the size of files; -1: no limit.
        huge_pages: setting of transparent huge pages.
        no_shared_memory: why ranks of this host cannot communicate through shared memory; empty: they can.
        nvidia_driver: version of the kernel's driver; None: there is none.
    """

    name: str
    addresses: tuple[str, ...]
    interfaces: dict[str, str]
    system: str
    cores: int
    cpu_quota: float | None
    memory_bytes: int
    memory_limit_bytes: int | None
    shm_bytes: int | None
    shm_free_bytes: int | None
    open_files: tuple[int, int]
    file_bytes: int
    huge_pages: str | None
    no_shared_memory: str
    nvidia_driver: str | None


def host_facts() -> HostFacts:
    """Of this host, as this process sees it."""
    name = socket.gethostname()
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    return HostFacts(
        name=name,
        addresses=_addresses(name),
        interfaces=_interfaces(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        cpu_quota=_cpu_quota(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        memory_limit_bytes=_number(_read(_CGROUP / "memory.max")),
        shm_bytes=None if shm is None else shm.total,
        shm_free_bytes=None if shm is None else shm.free,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        file_bytes=resource.getrlimit(resource.RLIMIT_FSIZE)[0],
        huge_pages=_chosen(_read(_THP)),
        no_shared_memory=why_impossible(),
        nvidia_driver=_nvidia_driver(),
    )


def _addresses(name: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the latter: the name can be none of a host
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def _interfaces() -> dict[str, str]:
    try:
        names = [name for _, name in socket.if_nameindex()]
    except OSError:
        return {}
    return {name: _address_of(name) for name in names}


def _address_of(interface: str) -> str:
    """The IPv4 address of an interface, by the ioctl of Linux."""
    if not sys.platform.startswith("linux"):
        return ""
    import fcntl  # noqa: PLC0415  # not on every system
    import struct  # noqa: PLC0415

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        siocgifaddr = 0x8915
        packed = fcntl.ioctl(probe.fileno(), siocgifaddr, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(packed[20:24])
    return ""


def _cpu_quota() -> float | None:
    quota, _, period = (_read(_CGROUP / "cpu.max") or "").partition(" ")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None


def _nvidia_driver() -> str | None:
    text = _read(Path("/proc/driver/nvidia/version"))
    if text is None:
        return "unknown" if os.path.exists("/dev/nvidiactl") else None
    words = text.split()
    return next((word for word in words if word[:1].isdigit() and "." in word), "unknown")


def _read(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _chosen(text: str | None) -> str | None:
    """The word in brackets: "madvise" of "always [madvise] never"."""
    return text.partition("[")[2].partition("]")[0] or None if text is not None else None
