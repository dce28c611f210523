"""What watchdogs tell each other through the job's store, without waiting for a store that does not answer."""

import json
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from hybridpp.cluster.patient_store import BOARD_THREAD
from hybridpp.nn.torch_private import PrefixStore, Store, connection_of

T = TypeVar("T")

_STORE_S = 30.0


class StoreSilentError(Exception):
    """The store did not answer in time; internal to the watchdog."""


class WatchdogBoard:
    """Keys of the watchdogs in the store of one attempt of a job.

    A store whose process is stopped never answers, and torch waits for it for ever. So a thread of its own asks, and
    this object waits for that thread.

    Args:
        store: of the attempt. A connection of its own is made: in the first one, a call may wait for another rank.
        rank: this rank.
        size: number of ranks.
        patience_s: how long to wait for an answer.
    """

    def __init__(self, store: Store, rank: int, size: int, patience_s: float):
        self.rank, self.size = rank, size
        self._patience_s = patience_s
        self._store: Store = PrefixStore("hybridpp watchdog", connection_of(store))
        self._store.set_timeout(timedelta(seconds=_STORE_S))
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None] = queue.SimpleQueue()
        self._num_pending = 0
        self._thread = threading.Thread(target=self._answer, name=BOARD_THREAD, daemon=True)
        self._thread.start()

    def publish(self, state: str) -> bool:
        """Publish this rank's state; returns whether there is an alarm."""

        def exchange() -> bool:
            self._store.set(f"state {self.rank}", state)
            return self._store.check(["alarm"])

        return self._call(exchange)

    def states(self, ranks: Sequence[int]) -> list[str]:
        """The states of ranks, which have published one."""
        return [text.decode() for text in self._call(lambda: self._store.multi_get([f"state {one}" for one in ranks]))]

    def claim(self, alarm: Any) -> bool:
        """Raise the alarm, which no other rank may raise as this one; returns whether this rank is the first and is to
        report. Else the alarm of the first one is there."""
        text = json.dumps(alarm)
        return self._call(lambda: self._store.compare_set("alarm", "", text) == text.encode())

    def is_first(self, task: str) -> bool:
        """Whether this rank is the first to take a task."""
        return self._call(lambda: self._store.add(task, 1) == 1)

    def put(self, key: str, value: Any) -> None:
        """Write a value."""
        self._call(lambda: self._store.set(key, json.dumps(value)))

    def get(self, key: str) -> Any:
        """A value; None if there is none."""

        def read() -> Any:
            return json.loads(self._store.get(key)) if self._store.check([key]) else None

        return self._call(read)

    def close(self) -> None:
        """End the thread."""
        self._calls.put(None)

    def _call(self, function: Callable[[], T]) -> T:
        """Call a function in the thread that talks to the store.

        Raises:
            StoreSilentError: the store does not answer, or is gone.
        """
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        if self._num_pending:
            raise StoreSilentError("an earlier call is still under way")
        self._num_pending += 1
        self._calls.put((function, answers))
        try:
            result: T | Exception = answers.get(timeout=self._patience_s)
        except queue.Empty:
            raise StoreSilentError("no answer") from None
        if isinstance(result, Exception):
            raise StoreSilentError(str(result)) from result
        return result

    def _answer(self) -> None:
        while (call := self._calls.get()) is not None:
            function, answers = call
            try:
                result: Any = function()
            except RuntimeError as error:  # all errors of torch's stores
                result = error
            self._num_pending -= 1
            answers.put(result)
