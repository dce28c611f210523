"""How fast a save in the background may go, so that a step beside it is about as fast as one alone."""

import os
import threading
import time

# Of a rest, after which it looks whether the process ends.
_MOST_S = 0.1


class Pace:
    """Lets one thread use a share of a processor: after each piece of work, it rests as long as that takes.

    Whoever waits for the thread calls :meth:`hurry`; at the end of the process, it does not rest either.

    Args:
        share: of one processor, above 0; from 1 on, there are no rests.
    """

    def __init__(self, share: float):
        self._share = share
        self._hurried = threading.Event()
        self.begin()

    def begin(self) -> None:
        """Count from now on, on the thread that calls it."""
        self._used, self._began = time.thread_time(), time.monotonic()

    def rest(self) -> None:
        """Rest until the processor's time since the last rest is no more than the share."""
        end = self._began + (time.thread_time() - self._used) / self._share
        while threading.main_thread().is_alive() and (left := end - time.monotonic()) > 0:
            if self._hurried.wait(min(left, _MOST_S)):
                break
        self.begin()

    def hurry(self) -> None:
        """Rest no longer, and never again."""
        self._hurried.set()


def processors() -> int:
    """How many processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
