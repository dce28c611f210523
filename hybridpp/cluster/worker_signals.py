"""Signals that tell a job to stop, in worker processes of data loaders.

Launchers signal groups of processes, workers among them. A worker that ends by that takes its rank along, which could
otherwise finish its step and save. So workers leave these signals to the rank, with which they end.

They have handlers rather than a mask: a mask would stay in programs that a worker starts (a decoder of videos), which
then could not be ended, and would not hold for threads that native libraries have started before. A handler of Python
does not learn who sent SIGTERM, and does not run while native code does; so that of SIGTERM is machine code.
"""

import ctypes
import mmap
import multiprocessing
import os
import platform
import signal
import struct
import sys
from collections.abc import Callable, Collection

_SI_PID = 16  # of the sender, in siginfo_t of 64-bit Linux
_SA_SIGINFO, _SA_RESTART = 4, 0x10000000


class _Action(ctypes.Structure):
    """``struct sigaction`` of the C library, on 64-bit Linux."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


def leave_to_rank(numbers: Collection[int]) -> None:
    """Let these signals do nothing in this process from now on, but for SIGTERM of the rank: Python ends workers so.

    SIGTERM stays as it is where the system is not Linux, the processor neither x86-64 nor ARM64, or memory must not
    hold code. Call it in the main thread of a worker.
    """
    for number in numbers:
        if number == signal.SIGTERM:
            _end_by_rank_alone()
        else:
            signal.signal(number, _do_nothing)
            # Native code may not know that a call can end early.
            signal.siginterrupt(number, False)


def _do_nothing(number: int, frame: object) -> None:
    pass


def _end_by_rank_alone() -> None:
    make = _CODE.get(platform.machine()) if sys.platform == "linux" else None
    if make is None:
        return
    # Under a fork server, the parent of this process is the server.
    rank = multiprocessing.parent_process()
    address = _executable(make(os.getppid() if rank is None or rank.pid is None else rank.pid))
    if address is not None:
        action = _Action(handler=address, flags=_SA_SIGINFO | _SA_RESTART)
        ctypes.CDLL(None).sigaction(signal.SIGTERM, ctypes.byref(action), None)


def _executable(code: bytes) -> int | None:
    """The address of memory with this code, which is never given back; None: the system refuses."""
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    page.write(code)
    _PAGES.append(page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    # The kernel makes what was written visible to the processor's loads of code, which on ARM are others.
    pages = (ctypes.c_void_p(address), ctypes.c_size_t(len(page)), mmap.PROT_READ | mmap.PROT_EXEC)
    return None if ctypes.CDLL(None).mprotect(*pages) else address


def _x86_64(rank: int) -> bytes:
    """Of ``void handler(int number, siginfo_t *info, void *context) { if (info->si_pid == rank) _exit(0); }``."""
    return b"".join(
        (
            b"\x81\x7e" + struct.pack("<bi", _SI_PID, rank),  # cmp dword ptr [rsi + 16], rank
            b"\x75\x09",  # jne to ret
            b"\x31\xff",  # xor edi, edi
            b"\xb8\xe7\x00\x00\x00",  # mov eax, 231 (exit_group)
            b"\x0f\x05",  # syscall
            b"\xc3",  # ret
        )
    )


def _arm64(rank: int) -> bytes:
    """The same."""
    words = (
        0xB9400028 | _SI_PID // 4 << 10,  # ldr w8, [x1, #16]
        0x52800009 | (rank & 0xFFFF) << 5,  # mov w9, #low half
        0x72A00009 | rank >> 16 << 5,  # movk w9, #high half, lsl #16
        0x6B09011F,  # cmp w8, w9
        0x54000081,  # b.ne to ret
        0xD2800000,  # mov x0, #0
        0xD2800BC8,  # mov x8, #94 (exit_group)
        0xD4000001,  # svc #0
        0xD65F03C0,  # ret
    )
    return struct.pack(f"<{len(words)}I", *words)


_CODE: dict[str, Callable[[int], bytes]] = {"x86_64": _x86_64, "aarch64": _arm64}
_PAGES: list[mmap.mmap] = []
