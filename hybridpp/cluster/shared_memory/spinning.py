"""How long a rank that waits stays awake."""

import os
import time
from collections.abc import Callable

# A processor that goes to sleep is late to wake, in a virtual machine by up to milliseconds.
_SPIN_S = 1e-3
# A yield that takes longer gave the processor to something else: it takes a microsecond if nothing else can run.
_YIELD_S = 1e-4
# For how long a rank does not spin after that.
_PAUSE_S = 1.0


class Spinning:
    """Waits awake for what comes soon, as long as nothing else needs the processor.

    Where more can run than there are processors (workers that load data, other jobs), spinning slows the rank down: to
    yield is to give up what is left of a time slice and the claim to it (3 ms in Linux), while a rank that sleeps gets
    the processor as soon as it is woken. So a rank that saw something else run sleeps at once for a while.

    Args:
        clock: in seconds.
        give_way: lets others run, and returns at once if there are none.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, give_way: Callable[[], None] = os.sched_yield):
        self._clock, self._give_way = clock, give_way
        self._paused_until = float("-inf")

    def until(self, is_ready: Callable[[], bool]) -> bool:
        """Whether ``is_ready()``, now or while this rank spins."""
        if is_ready():
            return True
        now = self._clock()
        if now < self._paused_until:
            return False
        end = now + _SPIN_S
        while now < end:
            self._give_way()
            before, now = now, self._clock()
            if now - before > _YIELD_S:
                self._paused_until = now + _PAUSE_S
                end = now
            if is_ready():
                return True
        return False
