"""A dataloader that knows which samples the training loop took, and can go on after them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from hybridpp.cluster import kill_at_exit
from hybridpp.data_parallel import PassStart, RepeatedSamples, ShardedBatchSampler, ShardedIterableDataset
from hybridpp.errors import CheckpointError
from hybridpp.nn.torch_private import workers_of
from hybridpp.pipeline import ReadAheadIterator


class DataPosition(NamedTuple):
    """What a training loop has taken of its data; the same on every rank.

    Attributes:
        epoch: of the pass that it is in; the next one where a pass has ended.
        samples: taken of it, over all replicas.
        passes: iterators that were made before this pass: each draws a seed of the workers.
        dataset_size: samples of an epoch; None: it is not known.
        seed: of the orders of the epochs; None: samples come in the order of the dataset.
    """

    epoch: int
    samples: int
    passes: int
    dataset_size: int | None
    seed: int | None


@dataclass
class _Taken:
    """How many batches were taken from an iterator, which may be gone."""

    num_batches: int = 0


class _CountingIterator(ReadAheadIterator):
    """An iterator that counts what is taken from it in a place of the loader, which does not keep workers alive.

    Args:
        iterator: what it reads from.
        taken: the place.
        made_of: see :attr:`ReadAheadIterator.made_of`.
    """

    def __init__(self, iterator: Iterator[Any], taken: _Taken, made_of: Callable[[], Mapping[str, str]]):
        super().__init__(iterator)
        self._taken, self._made_of = taken, made_of

    @property
    def made_of(self) -> Mapping[str, str]:
        return self._made_of()

    def skip(self) -> None:
        super().skip()
        self._taken.num_batches += 1


class _RepeatedBatch(NamedTuple):
    """A batch of samples that only fill up a step."""

    batch: Any


class MarkingCollate:
    """A ``collate_fn`` that marks batches of samples that only fill up a step, also in a worker.

    Args:
        collate: the dataloader's own.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]):
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        batch = self._collate(samples)
        return _RepeatedBatch(batch) if isinstance(samples, RepeatedSamples) else batch


class ReplicaDataLoader(DataLoader[Any]):
    """A ``DataLoader`` whose iterators can read a batch ahead, so that all ranks can check it in time.

    What counts as taken is what the loop took from the last iterator: not what workers fetched, nor what was read
    ahead.

    Args:
        dataset, options: as those of ``DataLoader``, with a :class:`ShardedBatchSampler` or on a
            :class:`ShardedIterableDataset`.
    """

    def __init__(self, dataset: Any, **options: Any):
        super().__init__(dataset, **options)
        self._sampler = self.batch_sampler if isinstance(self.batch_sampler, ShardedBatchSampler) else None
        self._stream = dataset if isinstance(dataset, ShardedIterableDataset) else None
        self._taken: _Taken | None = None
        self._num_iterators = 0
        # Of a stream, whose passes begin when their iterators are made.
        self._stream_pass, self._next_pass = PassStart(0, 0), PassStart(0, 0)
        self._passes_before = 0
        self._repeated: set[int] = set()

    def __iter__(self) -> Any:
        self._num_iterators += 1
        if self._sampler is not None:
            self._passes_before = self._sampler.num_passes
        self._stream_pass, self._next_pass = self._next_pass, PassStart(self._next_pass.epoch + 1, 0)
        if self._stream is not None:
            self._stream.num_skipped = self._stream_pass.num_samples
        self._taken = _Taken()
        self._repeated = set()
        batches = super().__iter__()
        kill_at_exit(workers_of(batches))
        read = batches if self._stream is None else self._unmarked(batches)
        iterator = _CountingIterator(read, self._taken, partial(_made_of, self._source))
        if self._stream is not None:  # a worker has a copy
            self._stream.num_skipped = 0
        return iterator

    @property
    def made_of(self) -> Mapping[str, str]:
        """What all ranks must have made the loader of alike, and its last pass, as texts by name."""
        return _made_of(self._source)

    @property
    def _source(self) -> ShardedBatchSampler | ShardedIterableDataset:
        source = self._sampler or self._stream
        assert source is not None, "see the class"
        return source

    @property
    def _global_size(self) -> int:
        return self._source.batch_size * self._source.num_replicas

    def repeats(self, step: int) -> bool:
        """Whether this replica's batch of a step of the last iterator holds only a sample that fills up the step."""
        return step in self._repeated if self._sampler is None else self._sampler.repeats(step)

    def _unmarked(self, batches: Iterator[Any]) -> Iterator[Any]:
        repeated = self._repeated  # of this pass
        for number, batch in enumerate(batches):
            if isinstance(batch, _RepeatedBatch):
                repeated.add(number)
                batch = batch.batch
            yield batch

    def position(self) -> DataPosition:
        """What the loop has taken. Call it between steps; nothing is communicated."""
        is_begun = self._taken is not None
        if self._sampler is None:
            start, upcoming = self._stream_pass, self._next_pass
        else:
            start, upcoming = self._sampler.current, self._sampler.next_start
            is_begun = is_begun and self._sampler.num_passes > self._passes_before
        passes = self._num_iterators
        if is_begun and self._taken is not None:
            num_taken = self._taken.num_batches
            if self._sampler is None or num_taken < self._sampler.num_steps_after(start.num_samples):
                taken = start.num_samples + num_taken * self._global_size
                upcoming, passes = PassStart(start.epoch, taken), passes - 1
        sampler = self._sampler
        if sampler is None:
            return DataPosition(*upcoming, passes, None, None)
        return DataPosition(*upcoming, passes, sampler.num_samples, sampler.seed if sampler.shuffle else None)

    def check_position(self, position: DataPosition) -> None:
        """Refuse a position in other data.

        Raises:
            CheckpointError: in the middle of an epoch, the dataset has another size, or the samples another order.
        """
        here = self.position()
        if position.samples and (position.dataset_size, position.seed) != (here.dataset_size, here.seed):
            raise CheckpointError(
                f"the checkpoint was saved in the middle of an epoch of other data: {_in_words(position)}, and here "
                f"are {_in_words(here)}. Use the same dataset, seed and shuffle, or a checkpoint from the end of an "
                "epoch."
            )

    def go_on(self, position: DataPosition) -> int:
        """Let the next pass go on at a position, whatever batch size and replicas it was reached with.

        Returns:
            How many of the ``len(self)`` steps of the epoch are done; 0 where the length is not known.
        """
        start = PassStart(position.epoch, position.samples)
        self._taken = None
        if isinstance(self.generator, torch.Generator):
            for _ in range(position.passes - self._num_iterators):
                torch.empty((), dtype=torch.int64).random_(generator=self.generator)
            self._num_iterators = max(self._num_iterators, position.passes)
        if self._sampler is None:
            self._next_pass = start
            return position.samples // self._global_size
        self._sampler.start_at(start)
        return len(self._sampler) - self._sampler.num_steps_after(start.num_samples)


def _made_of(source: ShardedBatchSampler | ShardedIterableDataset) -> dict[str, str]:
    """What replicas must have made their data of alike, so that each sees other samples."""
    found = {"batch_size": repr(source.batch_size), "drop_last": repr(source.drop_last)}
    if isinstance(source, ShardedBatchSampler):
        found |= {"the length of the dataset": repr(source.num_samples), "shuffle": repr(source.shuffle)}
        found["the first sample of the pass"] = repr(source.current.num_samples)
        if source.shuffle:
            found |= {"seed": repr(source.seed), "the epoch": repr(source.current.epoch)}
    return found


def _in_words(position: DataPosition) -> str:
    size = "a stream" if position.dataset_size is None else f"{position.dataset_size} samples"
    return f"{size}, not shuffled" if position.seed is None else f"{size}, shuffled with seed {position.seed}"
