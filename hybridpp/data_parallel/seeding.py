"""Random numbers that depend only on the sample: not on workers, batches or replicas."""

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset, get_worker_info


class EpochIndices(list[int]):
    """The indices of a batch, and its epoch."""

    def __init__(self, indices: Iterable[int], epoch: int):
        super().__init__(indices)
        self.epoch = epoch


class _Samples(list[Any]):
    """The samples of a batch, and a seed key for random numbers that the collate function draws."""

    def __init__(self, samples: Iterable[Any], key: tuple[Any, ...]):
        super().__init__(samples)
        self.key = key


class SeededDataset(Dataset[Any]):
    """A dataset whose samples a loader loads with random generators that are seeded with (seed, epoch, index).

    It forwards attribute access to the wrapped dataset. Indexing it directly sets no generator.

    Args:
        dataset: a map-style dataset. Samples are loaded one by one, even if it has ``__getitems__``.
        seed: the same on all ranks.
    """

    def __init__(self, dataset: Any, seed: int):
        # Attributes that are set later belong to the dataset: a worker may open its files this way.
        object.__setattr__(self, "_dataset", dataset)
        object.__setattr__(self, "_seed", seed)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: Any) -> list[Any]:
        """The samples of a batch; called by a loader."""
        if not isinstance(indices, EpochIndices):
            return [self._dataset[index] for index in indices]
        samples = []
        with _own_generators():
            for index in indices:
                _seed(self._seed, indices.epoch, index)
                samples.append(self._dataset[index])
        return _Samples(samples, (self._seed, indices.epoch, "batch", *indices[:1]))

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_dataset"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._dataset, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return SeededDataset, (self._dataset, self._seed)


class SeededCollate:
    """A ``collate_fn`` with generators seeded by the first sample of the batch: the same for any number of workers.

    What it draws depends on the batch, and so on the number of replicas.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]):
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        if not isinstance(samples, _Samples):
            return self._collate(samples)
        with _own_generators():
            _seed(*samples.key)
            return self._collate(list(samples))


def _seed(*key: Any) -> None:
    number = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")
    random.seed(number)
    numpy.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number % 2**63)


@contextmanager
def _own_generators() -> Iterator[None]:
    """A context in which generators may be seeded; they are restored, except in workers, which use them only here."""
    if get_worker_info() is not None:
        yield
        return
    before = random.getstate(), numpy.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        numpy.random.set_state(before[1])
        torch.default_generator.set_state(before[2])
