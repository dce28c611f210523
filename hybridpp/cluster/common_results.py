"""Results that the ranks of one process have in common: the first that needs one computes it for all."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")

# Kept for ranks that have not asked yet. They ask soon, at the same point of a step.
_MAX_RESULTS = 16


class CommonResults:
    """Results of one rank's work that other ranks of its process do not repeat.

    What ranks do in turn is not skipped: where a computation communicates, every rank computes.

    Args:
        kind: what the results here have in common; part of every key.
        results: of all ranks, by key.
        num_sent: the number of messages that this rank has sent and received so far, collectives among them.
    """

    def __init__(self, kind: Hashable, results: dict[Hashable, Any], num_sent: Callable[[], int]):
        self._kind = kind
        self._results = results
        self._num_sent = num_sent

    def __deepcopy__(self, memo: dict[int, Any]) -> "CommonResults":
        """The same: a copy of a model is on the same rank."""
        return self

    def get(self, key: Hashable, make: Callable[[], T], is_common: Callable[[T], bool]) -> T:
        """The result for a key, of whichever rank made it first.

        Args:
            key: all that the result depends on.
            make: computes it.
            is_common: whether another rank could use it.
        """
        key = (self._kind, key)
        if key in self._results:
            found: T = self._results[key]
            return found
        before = self._num_sent()
        made = make()
        if self._num_sent() == before and is_common(made):
            self._results[key] = made
            while len(self._results) > _MAX_RESULTS:
                del self._results[next(iter(self._results))]
        return made
