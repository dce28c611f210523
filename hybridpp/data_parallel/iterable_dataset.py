"""Iterable datasets: every replica takes its part of the same sequence of samples."""

from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

from torch.utils.data import IterableDataset

from hybridpp.data_parallel.sampler import check_sizes, replica_slice


class RepeatedSamples(list[Any]):
    """Samples that only fill up a step, because other replicas have the last ones."""


class ShardedIterableDataset(IterableDataset[Any]):
    """One replica's batches (lists of samples) of an iterable that every rank reads completely.

    Batches are as those of :class:`ShardedBatchSampler`: ``R`` replicas with batch size ``B`` see, step by step, the
    samples of one replica with batch size ``B * R``, and the last samples are distributed evenly. The number of samples
    need not be known.

    Args:
        stream: yields the same samples in the same order on every rank; it is iterated again in each epoch.
        batch_size: samples per replica and step.
        num_replicas: the data-parallel size.
        replica: which replica this is.
        drop_last: whether to skip an incomplete last global batch.

    Attributes:
        num_skipped: samples that the next pass leaves out at its start, over all replicas; it reads them.

    Raises:
        ConfigError: a size is below 1, or ``replica`` is not one of ``num_replicas``.
    """

    def __init__(self, stream: Any, *, batch_size: int, num_replicas: int, replica: int, drop_last: bool = False):
        check_sizes(batch_size, num_replicas, replica)
        self.stream = stream
        self.batch_size = batch_size
        self.num_replicas = num_replicas
        self.replica = replica
        self.drop_last = drop_last
        self.num_skipped = 0

    def __iter__(self) -> Iterator[list[Any]]:
        num_skipped, self.num_skipped = self.num_skipped, 0
        return self._batches(num_skipped)

    def _batches(self, num_skipped: int) -> Iterator[list[Any]]:
        samples = iter(self.stream)
        size = self.batch_size * self.num_replicas
        first = list(islice(samples, min(num_skipped, self.num_replicas)))
        for _ in islice(samples, num_skipped - len(first)):
            pass
        while batch := list(islice(samples, size)):
            if len(batch) < size and self.drop_last:
                return
            first = [*first, *batch][: self.num_replicas]
            missing = max(0, self.num_replicas - len(batch))
            own = replica_slice([*batch, *islice(cycle(first), missing)], self.num_replicas, self.replica)
            yield RepeatedSamples(own) if len(batch) <= self.replica else own
            if len(batch) < size:
                return
