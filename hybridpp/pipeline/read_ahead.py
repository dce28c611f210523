"""Iterators whose next item can be read before it is taken."""

from collections.abc import Iterator
from typing import Any, NamedTuple


class _Outcome(NamedTuple):
    item: Any
    error: Exception | None


class ReadAheadIterator(Iterator[Any]):
    """An iterator with :meth:`peek`. An item that was looked at is not lost: ``next`` returns it.

    Args:
        iterator: what it reads from; its attributes can be read here, too.

    Attributes:
        num_taken: number of items taken so far.
    """

    def __init__(self, iterator: Iterator[Any]):
        self.num_taken = 0
        self._iterator = iterator
        self._outcome: _Outcome | None = None

    def peek(self) -> Any:
        """The item that ``next`` will return, without taking it; raises what ``next`` will raise."""
        if self._outcome is None:
            try:
                self._outcome = _Outcome(next(self._iterator), None)
            except Exception as error:
                self._outcome = _Outcome(None, error)
        if self._outcome.error is not None:
            raise self._outcome.error
        return self._outcome.item

    def skip(self) -> None:
        """Drop the item that :meth:`peek` returned, or the error that it raised."""
        self.num_taken += 1
        self._outcome = None

    def __next__(self) -> Any:
        try:
            return self.peek()
        finally:
            if self._outcome is not None:
                self.skip()

    def __len__(self) -> int:
        # Of the whole pass, as DataLoader's iterators say it.
        return len(self._iterator)  # type: ignore[arg-type]  # where it has one

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._iterator, name)
