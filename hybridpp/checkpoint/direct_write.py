"""Write memory to a file past the cache of files, which costs a tenth of the processor's time."""

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

BLOCK = 2**25
"""Bytes that are written at a time: some milliseconds of the processor, in a few calls."""

_PAGE = 2**12
# Called by ctypes, without the interpreter's lock, for which a step would wait: mmap's own method keeps it.
_LIBC = ctypes.CDLL(None) if hasattr(mmap, "MADV_DONTNEED") else None


class Pages:
    """Memory for a file, at the start of a page and up to the end of one; what is too much is zero.

    Args:
        size: of the file, in bytes.

    Attributes:
        size: the same.
        tensor: the memory, as bytes.
    """

    def __init__(self, size: int):
        self.size = size
        # Private, so that what is freed is given back; Windows has no other kind, and no flags.
        flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
        self._map = mmap.mmap(-1, max(1, -(-size // _PAGE)) * _PAGE, **flags)
        self.tensor: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)

    @property
    def data(self) -> memoryview:
        """All of the memory."""
        return memoryview(self._map)

    def free(self, start: int, stop: int) -> None:
        """Give a part back to the system, from the start of a page on; what is there from now on is undefined."""
        if _LIBC is not None and stop > start:
            address = ctypes.c_void_p(self.tensor.data_ptr() + start)
            _LIBC.madvise(address, ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)


def write_pages(
    path: Path, pages: Pages, before_block: Callable[[memoryview], None], after_block: Callable[[], None]
) -> None:
    """Write memory to a new file, block by block, and wait until it is on disk. Each block is freed when it is written.

    File systems that need their cache are written through it.

    Args:
        path: of the file.
        pages: what is written.
        before_block: called with the bytes of each block before it is written.
        after_block: called when it is.

    Raises:
        OSError: it cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    direct = None
    try:
        direct = _opened_directly(path)
        for start in range(0, pages.size, BLOCK):
            stop = min(start + BLOCK, pages.size)
            padded = min(start + BLOCK, pages.tensor.numel())
            with pages.data as data:
                before_block(data[start:stop])
                if direct is None or not _wrote_directly(direct, data[start:padded], start):
                    _write_all(descriptor, data[start:padded], start)
            pages.free(start, padded)
            after_block()
        os.ftruncate(descriptor, pages.size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
        if direct is not None:
            os.close(direct)


def _opened_directly(path: Path) -> int | None:
    try:
        return os.open(path, os.O_WRONLY | getattr(os, "O_DIRECT", 0))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None


def _wrote_directly(descriptor: int, data: memoryview, offset: int) -> bool:
    """Write a block; False: the file system does not allow it, and some of it may be written."""
    try:
        _write_all(descriptor, data, offset)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < data.nbytes:
        done += os.pwrite(descriptor, data[done:], offset + done)
