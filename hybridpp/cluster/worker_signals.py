"""Signals that tell a job to stop, in worker processes of data loaders.

Launchers signal groups of processes, workers among them. A worker that ends by that takes its rank along, which could
otherwise finish its step and save. So workers leave these signals to the rank, which kills them at its end.
"""

import signal
from collections.abc import Collection


def leave_to_rank(numbers: Collection[int]) -> None:
    """Let these signals do nothing in this process from now on. Call it in the main thread of a worker.

    They have handlers: programs that the worker starts (a decoder of videos) would inherit a mask, and that they are
    ignored, and could not be ended then.
    """
    for number in numbers:
        signal.signal(number, _do_nothing)
        # Native code may not know that a call can end early.
        signal.siginterrupt(number, False)


def _do_nothing(number: int, frame: object) -> None:
    pass
