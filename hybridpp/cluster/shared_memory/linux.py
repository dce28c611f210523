"""Linux system calls for which Python has no function, or only one that keeps a descriptor open.

(Python's ``mmap`` keeps one for each mapping up to 3.12; ``fcntl`` cannot be imported on all systems.)
"""

import ctypes
import functools
import mmap
import os

# linux/fcntl.h, linux/falloc.h
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1, 2, 4
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_FIXED_SIZE = _F_SEAL_SEAL | _F_SEAL_SHRINK | _F_SEAL_GROW


@functools.cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    address, size, number, offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
    library.mmap.argtypes, library.mmap.restype = (address, size, number, number, number, offset), address
    library.munmap.argtypes = (address, size)
    library.madvise.argtypes = (address, size, number)
    library.fallocate.argtypes = (number, number, offset, offset)
    return library


def _checked(result: int) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def new_memory(size: int) -> int:
    """Create anonymous memory of a sealed size; returns its descriptor. Pages are allocated at first use."""
    descriptor = os.memfd_create("hybridpp", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        _checked(_libc().fcntl(descriptor, _F_ADD_SEALS, _FIXED_SIZE))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def has_fixed_size(descriptor: int) -> bool:
    """Whether it is memory of a sealed size; reading memory that shrinks would end this process."""
    seals: int = _libc().fcntl(descriptor, _F_GET_SEALS)
    return seals != -1 and seals & _FIXED_SIZE == _FIXED_SIZE


def map_memory(descriptor: int, size: int, writable: bool) -> int:
    """Map the memory of a descriptor, which may be closed afterwards. It is excluded from core dumps."""
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    # None stands for the address 0; failure is the highest one.
    address = _libc().mmap(None, size, protection, mmap.MAP_SHARED, descriptor, 0) or 0
    if address == ctypes.c_void_p(-1).value:
        _checked(-1)
    try:
        _checked(_libc().madvise(address, size, mmap.MADV_DONTDUMP))
    except OSError:
        unmap_memory(address, size)
        raise
    return int(address)


def unmap_memory(address: int, size: int) -> None:
    """Undo :func:`map_memory`. Nothing may use the address any more."""
    _checked(_libc().munmap(address, size))


def punch_hole(descriptor: int, start: int, size: int) -> None:
    """Return pages to the system; they read as zeros afterwards."""
    _checked(_libc().fallocate(descriptor, _PUNCH_HOLE | _KEEP_SIZE, start, size))
