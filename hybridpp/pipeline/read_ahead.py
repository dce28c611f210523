"""Iterators whose next item can be read before it is taken, and what was prepared of items that were read ahead."""

from collections.abc import Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from hybridpp.cluster import get_dist_logger

T = TypeVar("T")

# After so many items in a row that were prepared in vain, an iterator is read ahead no more. One is no reason: a script
# may take a batch itself, or evaluate once in an epoch.
_MAX_MISSES = 2


class _Outcome(NamedTuple):
    item: Any
    error: Exception | None


class ReadAheadIterator(Iterator[Any]):
    """An iterator with :meth:`peek`. An item that was looked at is not lost: ``next`` returns it.

    Args:
        iterator: what it reads from; its attributes can be read here, too.

    Attributes:
        num_taken: number of items taken so far.
        source: what it reads from.
    """

    def __init__(self, iterator: Iterator[Any]):
        self.num_taken = 0
        self.source = iterator
        self._outcome: _Outcome | None = None

    @property
    def made_of(self) -> Mapping[str, str]:
        """What all ranks must have made its data of alike, as texts by name; empty: that is not known."""
        return {}

    def peek(self) -> Any:
        """The item that ``next`` will return, without taking it; raises what ``next`` will raise."""
        if self._outcome is None:
            try:
                self._outcome = _Outcome(next(self.source), None)
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
        return len(self.source)  # type: ignore[arg-type]  # where it has one

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.source, name)


class _Prepared(NamedTuple, Generic[T]):
    """What was prepared of an item that was read ahead.

    Attributes:
        value: what was prepared.
        use: what it was prepared for.
        num_taken: items that were taken from the iterator before it.
    """

    value: T
    use: Any
    num_taken: int


class PreparedItems(Generic[T]):
    """What was prepared of the next items of iterators; one item per iterator.

    Args:
        user: what uses the items, in a warning.
    """

    def __init__(self, user: str):
        self._user = user
        self._prepared: WeakKeyDictionary[ReadAheadIterator, _Prepared[T]] = WeakKeyDictionary()
        # How many items were prepared in vain since the last one that was used.
        self._num_misses: WeakKeyDictionary[ReadAheadIterator, int] = WeakKeyDictionary()
        self._has_warned = False

    def may_prepare(self, data_iter: ReadAheadIterator) -> bool:
        """Whether to read the next item ahead; False where the last ones were used otherwise."""
        return self._num_misses.get(data_iter, 0) < _MAX_MISSES

    def put(self, data_iter: ReadAheadIterator, value: T, use: Any) -> None:
        """Keep what was prepared of the next item."""
        self._prepared[data_iter] = _Prepared(value, use, data_iter.num_taken)

    def take(self, data_iter: ReadAheadIterator, use: Any) -> tuple[T, bool] | None:
        """What was prepared, and whether it is of the next item and for this use; None: nothing was.

        If it is, the item counts as taken.
        """
        prepared = self._prepared.pop(data_iter, None)
        if prepared is None:
            return None
        if prepared.num_taken == data_iter.num_taken and prepared.use == use:
            self._num_misses.pop(data_iter, None)
            data_iter.skip()
            return prepared.value, True
        self._num_misses[data_iter] = self._num_misses.get(data_iter, 0) + 1
        if not self.may_prepare(data_iter):
            self._warn()
        return prepared.value, False

    def values(self) -> list[T]:
        """Everything that was prepared and not taken."""
        return [prepared.value for prepared in self._prepared.values()]

    def _warn(self) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        get_dist_logger().warning(
            f"{_MAX_MISSES} batches in a row were read ahead for {self._user} and then used otherwise: the script took "
            "them itself, or another model, criterion or gradient mode used the iterator. From this iterator, no more "
            "are read ahead, so every step waits until all ranks have read their batches. Make an iterator for each "
            "use: iter(dataloader).",
            ranks=[0],
        )
