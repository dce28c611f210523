"""Ask a store without waiting for ever: where its host is cut off, torch waits for the answer without a limit.

That also holds for what torch does over a store: it makes groups so.
"""

import atexit
import contextlib
import ctypes
import os
import queue
import socket
import stat
import struct
import threading
from collections.abc import Callable, Collection
from typing import TypeVar

from hybridpp.cluster.host_address import addresses_of
from hybridpp.nn.torch_private import Store, address_of_store

T = TypeVar("T")

# An answer takes a millisecond; the host that gives it may be busy.
PATIENCE_S = 10.0
# Threads that wait for answers.
_ASKING, BOARD_THREAD = "hybridpp store", "hybridpp watchdog store"
# For one that has its answer, and returns.
_RETURN_S = 1.0
# asm-generic/socket.h, linux/bpf_common.h
_SO_ATTACH_FILTER, _BPF_RETURN = 26, 0x06


class SilentStoreError(RuntimeError):
    """A store has not answered in time."""


def ask(call: Callable[[], T], patience_s: float | None = None) -> T:
    """What ``call`` returns, which asks a store; after ``patience_s`` (None: 10 s) without an answer, an error.

    Raises:
        Exception: it does.
        SilentStoreError: there was no answer in time; the thread that waits for one is left behind.
    """
    patience_s = PATIENCE_S if patience_s is None else patience_s
    answers: queue.SimpleQueue[T | Exception] = queue.SimpleQueue()

    def answer() -> None:
        try:
            answers.put(call())
        except Exception as error:
            answers.put(error)

    try:
        threading.Thread(target=answer, name=_ASKING, daemon=True).start()
    except RuntimeError:  # the interpreter ends
        return call()
    try:
        result = answers.get(timeout=patience_s)
    except queue.Empty:
        raise SilentStoreError(f"the job's store has not answered for {patience_s:g} s") from None
    if isinstance(result, Exception):
        raise result
    return result


def ignore_late_answers_at_exit(store: Store) -> None:
    """Let this process end in order also where it still waits for an answer of a store.

    If the answer came while the interpreter ends, Python would end the thread that waits for it, through frames of
    torch that allow no such end: the process would be aborted (SIGABRT), though its work was done. Later versions than
    3.13 of Python let such threads hang.
    """
    address = address_of_store(store)
    if address is not None:
        host, port = address
        atexit.register(_ignore_late_answers, addresses_of(host), port)


def _ignore_late_answers(addresses: Collection[str], port: int) -> None:
    waiting = [thread for thread in threading.enumerate() if thread.name in (_ASKING, BOARD_THREAD)]
    if not waiting:
        return
    with contextlib.suppress(OSError):  # a system without these files
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):  # that of the list is gone; nobody is connected
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    _drop_all(descriptor, addresses, port)
    for thread in waiting:
        thread.join(_RETURN_S)


def _drop_all(descriptor: int, addresses: Collection[str], port: int) -> None:
    """Let the kernel drop all that comes from one of these addresses; nothing is printed, as where it is closed."""
    instruction = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RETURN, 0, 0, 0))  # of each packet, 0 bytes
    program = struct.pack("HP", 1, ctypes.addressof(instruction))
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        is_network = connection.family in (socket.AF_INET, socket.AF_INET6)
        ip, its_port, *_ = connection.getpeername() if is_network else ("", 0)
        if its_port == port and ip.removeprefix("::ffff:") in addresses:
            connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
