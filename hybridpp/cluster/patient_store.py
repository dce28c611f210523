"""Ask a store without waiting for ever: where its host is cut off, torch waits for the answer without a limit.

That also holds for what torch does over a store: it makes groups so.
"""

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# An answer takes a millisecond; the host that gives it may be busy.
PATIENCE_S = 10.0


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
        threading.Thread(target=answer, name="hybridpp store", daemon=True).start()
    except RuntimeError:  # the interpreter ends
        return call()
    try:
        result = answers.get(timeout=patience_s)
    except queue.Empty:
        raise SilentStoreError(f"the job's store has not answered for {patience_s:g} s") from None
    if isinstance(result, Exception):
        raise result
    return result
