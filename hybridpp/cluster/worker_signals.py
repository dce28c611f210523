"""Signals that tell a job to stop, in worker processes of data loaders.

Launchers signal groups of processes, workers among them. A worker that ends by that takes its rank along, which could
otherwise finish its step and save. So workers leave these signals to the rank, with which they end.
"""

import os
import signal
import threading
from collections.abc import Collection


def leave_to_rank(numbers: Collection[int]) -> None:
    """Let these signals do nothing in this process from now on, but for SIGTERM of the parent: Python ends workers so.

    Nothing changes where the system cannot tell who sent a signal. Call it in the main thread, before other threads.
    """
    if not numbers or not hasattr(signal, "sigwaitinfo"):
        return
    # A handler in Python does not learn the sender; a thread that waits for the blocked signal does.
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    threading.Thread(target=_take, args=(frozenset(numbers),), name="hybridpp signals", daemon=True).start()


def _take(numbers: frozenset[int]) -> None:
    while True:
        info = signal.sigwaitinfo(numbers)
        if info.si_signo == signal.SIGTERM and info.si_pid == os.getppid():
            os._exit(0)
