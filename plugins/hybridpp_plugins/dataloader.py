"""Dataloaders over one replica's part of a dataset."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from hybridpp.cluster import EndWithRank, current_world
from hybridpp.config import require_bools, require_numbers, require_plain
from hybridpp.data_parallel import (
    SeededCollate,
    SeededDataset,
    ShardedBatchSampler,
    ShardedIterableDataset,
    stack_samples,
)
from hybridpp.errors import ConfigError, DataError
from hybridpp_plugins.replica_loader import MarkingCollate, ReplicaDataLoader

_NUM_SEEDS = 1 << 63
# Options of DataLoader that select samples.
_TAKEN = ("sampler", "batch_sampler", "generator")


@dataclass(frozen=True, kw_only=True)
class DataLoaderConfig:
    """How a replica reads a dataset.

    Attributes:
        batch_size: samples per replica and step; None: not given, which is refused.
        num_replicas: the data-parallel size.
        replica: this replica's index.
        shuffle: whether to draw a new order for each epoch.
        seed: of that order, of the samples, and of workers.
        drop_last: whether to skip an incomplete last global batch.
        seed_samples: whether random numbers drawn for a sample depend only on the sample; None: where samples have
            indices.
        collate_fn: makes a batch from samples; None stacks them, lists of numbers too.
        num_workers: processes that load data.
        options: further arguments of ``DataLoader``.

    Raises:
        ConfigError: a bool setting is no bool, an option selects samples, or there is no batch size.
    """

    batch_size: int | None
    num_replicas: int
    replica: int
    shuffle: bool
    seed: int
    drop_last: bool
    seed_samples: bool | None
    collate_fn: Callable[[list[Any]], Any] | None
    num_workers: int
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        require_bools(shuffle=self.shuffle, drop_last=self.drop_last)
        require_plain(batch_size=self.batch_size, seed=self.seed, num_workers=self.num_workers)
        require_numbers(int, seed=self.seed, num_workers=self.num_workers)
        if not 0 <= self.seed < _NUM_SEEDS:
            raise ConfigError(f"seed must be at least 0 and below 2**63: got seed={self.seed}.")
        if self.num_workers < 0:
            raise ConfigError(
                f"num_workers must be at least 0: got num_workers={self.num_workers}. 0 loads data in the rank itself."
            )
        if self.collate_fn is not None and not callable(self.collate_fn):
            raise ConfigError(
                f"collate_fn must be a function of a list of samples: got collate_fn={self.collate_fn!r:.200}. Leave "
                "it out to stack them."
            )
        if self.seed_samples is not None:
            require_bools(seed_samples=self.seed_samples)
        taken = [name for name in _TAKEN if self.options.get(name) is not None]
        if taken:
            raise ConfigError(
                f"prepare_dataloader selects each replica's samples itself: got {taken[0]}. Leave it out, or make a "
                "torch.utils.data.DataLoader with your sampler."
            )
        if self.batch_size is None:
            raise ConfigError("prepare_dataloader needs batch_size: the samples per replica and step.")
        require_numbers(int, batch_size=self.batch_size)

    def loader(self, dataset: Any) -> DataLoader[Any]:
        """A dataloader of this replica's batches.

        Raises:
            ConfigError: the dataset is iterable, and a setting needs indices.
            DataError: it is no dataset, has no length, is empty, or is too small for one step.
        """
        if isinstance(dataset, IterableDataset):
            return self._over_stream(dataset)
        is_number = getattr(dataset, "ndim", 1) == 0
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or is_number:
            raise DataError(
                f"a dataset needs __getitem__ and __len__, or must be a torch.utils.data.IterableDataset: got "
                f"{type(dataset).__name__}. Add these methods."
            )
        assert self.batch_size is not None, "checked above"
        sampler = ShardedBatchSampler(
            num_samples=len(dataset),
            batch_size=self.batch_size,
            num_replicas=self.num_replicas,
            replica=self.replica,
            shuffle=self.shuffle,
            seed=self.seed,
            drop_last=self.drop_last,
        )
        collate = self.collate_fn
        if self.seed_samples is not False:
            dataset = SeededDataset(dataset, self.seed)
            collate = collate and SeededCollate(collate)
        return self._made(dataset, batch_sampler=sampler, collate_fn=collate or stack_samples)

    def _over_stream(self, dataset: Any) -> DataLoader[Any]:
        if self.shuffle:
            raise ConfigError(
                f"{type(dataset).__name__} is iterable, so it sets the order of its samples: got shuffle=True. Shuffle "
                "inside of the dataset, with the same seed on all ranks."
            )
        if self.seed_samples:
            raise ConfigError(
                f"samples of {type(dataset).__name__} have no indices to seed generators with, because it is iterable: "
                "got seed_samples=True. Leave it out, and draw from a generator of the dataset's own."
            )
        if self.num_workers > 1:
            raise ConfigError(
                f"each worker would read all samples of {type(dataset).__name__}: got num_workers={self.num_workers}. "
                "Use 0 or 1."
            )
        assert self.batch_size is not None, "checked above"
        stream = ShardedIterableDataset(
            dataset,
            batch_size=self.batch_size,
            num_replicas=self.num_replicas,
            replica=self.replica,
            drop_last=self.drop_last,
        )
        return self._made(stream, batch_size=None, collate_fn=MarkingCollate(self.collate_fn or stack_samples))

    def _made(self, dataset: Any, **more: Any) -> DataLoader[Any]:
        # Seeds the workers: equal on all ranks of a replica, different between replicas.
        generator = torch.Generator().manual_seed(self.seed + self.replica)
        options = {name: value for name, value in self.options.items() if name not in _TAKEN}
        if self.num_workers:
            options["worker_init_fn"] = EndWithRank(options.get("worker_init_fn"), current_world().stop.signals)
        return ReplicaDataLoader(dataset, num_workers=self.num_workers, generator=generator, **more, **options)
