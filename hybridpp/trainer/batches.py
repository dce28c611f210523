"""One pass of a :class:`~hybridpp.trainer.Trainer` over a dataloader."""

from collections.abc import Callable, Iterable
from typing import Any

from hybridpp.pipeline import ReadAheadIterator


class Batches:
    """The batches of a pass, each of which is looked at before a step takes it from ``iterator``.

    Args:
        loader: a dataloader, or another iterable of this replica's batches.
        count_samples: the number of samples of a batch.
        num_taken: batches of the epoch that a resumed run took before.

    Attributes:
        iterator: for ``execute_pipeline``.
        length: number of batches of the epoch; None: not known.
        num_taken: batches of the epoch that steps took, or take now.
        batch: the present one; None: reading it failed, or there is none.
        num_samples: samples of it, without those that only fill up a step of all replicas.
    """

    def __init__(self, loader: Iterable[Any], count_samples: Callable[[Any], int], num_taken: int = 0):
        found = iter(loader)
        self.iterator = found if isinstance(found, ReadAheadIterator) else ReadAheadIterator(found)
        self.length = _length(loader)
        self.num_taken, self.batch, self.num_samples = num_taken, None, 0
        self._count_samples = count_samples
        self._repeats: Callable[[int], bool] = getattr(loader, "repeats", lambda step: False)

    @property
    def is_last(self) -> bool:
        """Whether the present batch is the last; False if that is not known."""
        return self.num_taken == self.length

    def advance(self) -> bool:
        """Look at the next batch; False after the last one.

        If the length is not known, or reading the batch fails, it is True: all ranks find that together, in
        ``execute_pipeline``.
        """
        if self.is_last:
            return False
        self.num_taken += 1
        self.batch, self.num_samples = None, 0
        try:
            self.batch = self.iterator.peek()
        except Exception:
            return True
        if not self._repeats(self.iterator.num_taken):
            self.num_samples = self._count_samples(self.batch)
        return True


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # of an iterable dataset
        return None
