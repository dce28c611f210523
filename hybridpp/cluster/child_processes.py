"""Processes that a rank has started: they end when it does, also where they are stopped.

A worker of torch's data loader looks every five seconds whether its rank lives, and Python ends its workers by SIGTERM.
Neither does anything to a worker that is stopped (SIGSTOP, job control, a debugger) or leaves SIGTERM to its rank: it
stays for ever, and at its exit Python waits for it. SIGKILL ends it.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterable
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import NoReturn
from weakref import WeakSet

from hybridpp.cluster.rank_process import RankProcess
from hybridpp.cluster.worker_signals import leave_to_rank

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_MAIN = "MainThread"
# Of the 107 bytes of a socket's path, "/listener-abcdefgh" takes 18.
_MAX_FOLDER = 85

_FLUSH_S = 0.3

# Workers to kill at the end of the process with this number.
_WORKERS: WeakSet[BaseProcess] = WeakSet()
_killing_process = 0


class EndWithRank:
    """A ``worker_init_fn`` of a data loader: the worker ends when its rank does, neither later nor before.

    The kernel kills it when its rank ends, however that ends. Signals that tell the job to stop are left to the rank.

    Args:
        init: what the worker does then; None: nothing.
        stop_signals: numbers of those signals.
    """

    def __init__(self, init: Callable[[int], None] | None = None, stop_signals: Collection[int] = ()):
        self._init = init
        self._stop_signals = stop_signals

    def __call__(self, worker: int) -> None:
        method = _start_method()
        # The kernel means the thread that started the worker. In a fork, that is the main thread, by the name it had.
        # Nobody knows the one that started an interpreter of its own.
        if sys.platform == "linux" and threading.main_thread().name == _MAIN and method != "spawn":
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            rank = multiprocessing.parent_process()
            # It has ended before that. A fork server would be the parent of this process.
            if method == "fork" and rank is not None and rank.pid != os.getppid():
                os._exit(1)
        leave_to_rank(self._stop_signals)
        if self._init is not None:
            self._init(worker)


def _start_method() -> str | None:
    """How ``multiprocessing`` has started this process; None: it did not."""
    known = {"ForkProcess": "fork", "SpawnProcess": "spawn", "ForkServerProcess": "forkserver"}
    kind = type(multiprocessing.current_process()).__name__
    if kind == "Process":
        return multiprocessing.get_start_method(allow_none=True)
    return known.get(kind)


def keep_sockets_in(folder: Path | None) -> None:
    """Let ``multiprocessing`` put its sockets into a folder that the launcher removes; those of killed processes stay.

    Args:
        folder: None: they are where Python puts them, as they are if the name of the folder is too long for a socket.
    """
    config = getattr(multiprocessing.current_process(), "_config", None)
    if folder is not None and config is not None and len(os.fsencode(folder)) <= _MAX_FOLDER and folder.is_dir():
        config.setdefault("tempdir", str(folder))


def kill_at_exit(workers: Iterable[BaseProcess]) -> None:
    """Kill processes that ``multiprocessing`` has started in this one, when it ends and they have not.

    Python would tell them to end by SIGTERM, and wait without a limit.
    """
    global _killing_process
    _WORKERS.update(workers)
    if _killing_process != os.getpid():
        _killing_process = os.getpid()
        Finalize(None, _kill_workers, exitpriority=0)


def _kill_workers() -> None:
    left = [child for child in multiprocessing.active_children() if child in _WORKERS]
    if left:
        _forget_ends_of_workers()
    for child in left:
        child.kill()


def kill_children(*, only_stopped: bool = False) -> None:
    """Kill the processes that ``multiprocessing`` has started in this one, which is about to end itself.

    Args:
        only_stopped: leave those that can end by themselves.
    """
    _forget_ends_of_workers()
    stopped = RankProcess.own().stopped_children if only_stopped else []
    for child in multiprocessing.active_children():
        if not only_stopped or child.pid in stopped:
            child.kill()


def end_process(code: int) -> NoReturn:
    """End this process, from any of its threads, with those that it has started; nothing is waited for.

    Args:
        code: its exit code.
    """
    kill_children()
    flush = threading.Thread(target=_flush, daemon=True)
    flush.start()
    flush.join(_FLUSH_S)
    os._exit(code)


def _flush() -> None:
    # What the main thread printed is otherwise lost; it may hold the lock of a stream for ever.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _forget_ends_of_workers() -> None:
    """Take torch's handler away, which raises an error in the main thread, as if that were what went wrong.

    From other threads, the one of Python could not be taken away.
    """
    ctypes.CDLL(None).signal(signal.SIGCHLD, ctypes.c_void_p(0))
