"""How many bytes a rank has allocated, read between two actions."""

import ctypes
import mmap
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

_PROBE_BYTES = 2**20


class MemoryReader(NamedTuple):
    """Reads the memory that a rank has in use.

    Attributes:
        kind: what it counts: ``"device"`` (torch's tensors on a CUDA device), ``"allocated"`` (what the process has of
            malloc), ``"resident"`` (pages of the process in memory).
        read: returns bytes.
    """

    kind: str
    read: Callable[[], int]


def memory_reader(device: torch.device) -> MemoryReader | None:
    """The best reader for ranks on a device; None: this host has none.

    On the CPU, glibc counts what its malloc has given out: tensors, and what Python has of it. Under another allocator,
    and elsewhere on Linux, it is the pages of the process.
    """
    if device.type == "cuda":
        return MemoryReader("device", lambda: torch.cuda.memory_allocated(device))
    allocated = _malloc_reader()
    if allocated is not None and _follows_tensors(allocated):
        return MemoryReader("allocated", allocated)
    if Path("/proc/self/statm").exists():
        return MemoryReader("resident", _resident_bytes)
    return None


class _Mallinfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc's malloc.h."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


@cache
def _malloc_reader() -> Callable[[], int] | None:
    with suppress(AttributeError, OSError, TypeError):  # another libc, glibc before 2.33, Windows
        mallinfo = ctypes.CDLL(None).mallinfo2
        mallinfo.restype = _Mallinfo

        def read() -> int:
            info = mallinfo()
            return int(info.uordblks) + int(info.hblkhd)

        return read
    return None


def _follows_tensors(read: Callable[[], int]) -> bool:
    """Whether tensors come from this malloc, rather than from one that was loaded before it."""
    before = read()
    probe = torch.empty(_PROBE_BYTES, dtype=torch.uint8)
    return read() - before >= probe.nbytes


def _resident_bytes() -> int:
    _, resident, *_ = Path("/proc/self/statm").read_text().split()
    return int(resident) * mmap.PAGESIZE
