"""Results that the ranks of one process have in common: the first that needs one computes it for all."""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar, cast

T = TypeVar("T")

# Kept for ranks that have not asked yet. They ask soon, at the same point of a step.
_MAX_RESULTS = 16
# Kept for runs to come.
_MAX_RESULTS_OF_ANY_RUN = 256


_MISSING: Any = object()


class _Hashed:
    """A key that is hashed once: one that describes a model has thousands of parts."""

    __slots__ = ("_hash", "_key")

    def __init__(self, key: Hashable):
        self._key = key
        self._hash = hash(key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashed) and other._key == self._key

    def __hash__(self) -> int:
        return self._hash


class ResultStores(NamedTuple):
    """Where results are kept, by key.

    Attributes:
        of_run: those of the ranks that run now.
        of_any_run: those that runs to come may take, too; None: each run computes its own.
    """

    of_run: dict[Hashable, Any]
    of_any_run: dict[Hashable, Any] | None


class CommonResults:
    """Results of one rank's work that other ranks of its process do not repeat.

    What ranks do in turn is not skipped: where a computation communicates, every rank computes.

    Args:
        kind: what the results here have in common; part of every key.
        stores: the results of all ranks.
        num_sent: the number of messages that this rank has sent and received so far, collectives among them.
    """

    def __init__(self, kind: Hashable, stores: ResultStores, num_sent: Callable[[], int]):
        self._kind = kind
        self._stores = stores
        self._num_sent = num_sent

    def __deepcopy__(self, memo: dict[int, Any]) -> "CommonResults":
        """The same: a copy of a model is on the same rank."""
        return self

    def get(self, key: Hashable, make: Callable[[], T], is_common: Callable[[T], bool], *, is_of_run: bool = True) -> T:
        """The result for a key, of whichever rank made it first.

        Args:
            key: all that the result depends on.
            make: computes it.
            is_common: whether another rank could use it.
            is_of_run: whether the key refers to objects of this run, so that it is equal to no key of another.
        """
        key = _Hashed((self._kind, key))
        results, limit = self._stores.of_run, _MAX_RESULTS
        if self._stores.of_any_run is not None and not is_of_run:
            results, limit = self._stores.of_any_run, _MAX_RESULTS_OF_ANY_RUN
        found = results.pop(key, _MISSING)
        if found is not _MISSING:
            results[key] = found  # now the most recent
            return cast(T, found)
        before = self._num_sent()
        made = make()
        if self._num_sent() == before and is_common(made):
            results[key] = made
            while len(results) > limit:
                del results[next(iter(results))]
        return made
