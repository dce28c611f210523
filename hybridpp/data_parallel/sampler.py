"""Batches for data parallelism: every replica takes its slice of the same global batch."""

import hashlib
from collections.abc import Iterator
from itertools import cycle, islice
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Sampler

from hybridpp.data_parallel.seeding import EpochIndices
from hybridpp.errors import ConfigError, DataError

Item = TypeVar("Item")


class PassStart(NamedTuple):
    """Where a pass over the data starts.

    Attributes:
        epoch: of the pass.
        num_samples: samples of the epoch, over all replicas, that it leaves out, because they were seen before.
    """

    epoch: int
    num_samples: int


class ShardedBatchSampler(Sampler[list[int]]):
    """One replica's batches of sample indices; together, the replicas' batches are those of one large replica.

    Global batch ``k`` is ``order[k*B*R : (k+1)*B*R]`` of the epoch's order, and replica ``r`` takes the ``r``-th
    contiguous slice of it. So R replicas with batch size B see, step by step, the samples of one replica with batch
    size B*R. With 10 samples, B=2 and R=2::

        step        0       1       2
        replica 0 | 0 1   | 4 5   | 8
        replica 1 | 2 3   | 6 7   | 9

    An incomplete last global batch is divided as evenly as possible, larger slices first: sizes differ by at most one,
    and no sample is repeated or skipped. Only if it holds fewer samples than there are replicas, the epoch's first
    samples fill it up to one per replica, because every replica must take part in every step. If slices differ in size,
    weight each replica's mean loss by its number of samples.

    Pass it as ``batch_sampler`` to a ``DataLoader``. Each pass over it is the next epoch: 0, 1, 2 and so on. A pass
    starts when its first batch is drawn (a DataLoader with workers makes an iterator that it never uses).

    Args:
        num_samples: length of the dataset.
        batch_size: B, samples per replica and step.
        num_replicas: R, the data-parallel size.
        replica: r, which replica this is.
        shuffle: draw a new order for each epoch, from ``seed`` and the epoch only; else the order of the dataset.
        seed: must be the same on every replica.
        drop_last: whether to skip an incomplete last global batch.

    Attributes:
        current: where the pass started that began last.
        num_passes: number of passes that have begun.

    Raises:
        ConfigError: ``batch_size`` or ``num_replicas`` is below 1, or ``replica`` is not one of ``num_replicas``.
        DataError: the dataset is empty, or ``drop_last`` would leave no step.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        batch_size: int,
        num_replicas: int,
        replica: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
    ) -> None:
        check_sizes(batch_size, num_replicas, replica)
        _check_dataset(num_samples, batch_size, num_replicas, drop_last)
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.num_replicas = num_replicas
        self.replica = replica
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self._next_epoch = 0
        self._start = PassStart(0, 0)
        self.current = PassStart(0, 0)
        self.num_passes = 0

    @property
    def epoch(self) -> int:
        """The epoch of the next pass; during a pass, that of the pass after it."""
        return self._next_epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass; later passes count up from there.

        Raises:
            ConfigError: ``epoch`` is negative.
        """
        if epoch < 0:
            raise ConfigError(f"epoch must not be negative: got epoch={epoch}. Count epochs from 0.")
        self._next_epoch = epoch

    def start_at(self, start: "PassStart") -> None:
        """Let the next pass be of an epoch without its first samples; later passes are complete."""
        self.set_epoch(start.epoch)
        self._start = start

    @property
    def next_start(self) -> "PassStart":
        """Where the next pass starts."""
        epoch = self._next_epoch
        return self._start if self._start.epoch == epoch else PassStart(epoch, 0)

    def __len__(self) -> int:
        """Number of steps in an epoch, the same on every replica."""
        return self.num_steps_after(0)

    def num_steps_after(self, num_samples: int) -> int:
        """Number of steps that are left of an epoch after its first ``num_samples`` samples."""
        num_full, num_left = divmod(max(0, self.num_samples - num_samples), self.batch_size * self.num_replicas)
        return num_full if self.drop_last or num_left == 0 else num_full + 1

    def repeats(self, step: int) -> bool:
        """Whether this replica's batch of a step of the pass that began last is only there to fill up the step."""
        num_left = self.num_samples - self.current.num_samples - step * self.batch_size * self.num_replicas
        return num_left <= self.replica

    def __iter__(self) -> Iterator[list[int]]:
        """Batches of indices, with their epoch."""
        epoch, first = self.current = self.next_start
        self._start = PassStart(0, 0)
        self._next_epoch, self.num_passes = epoch + 1, self.num_passes + 1
        order = self._order(epoch)
        global_size = self.batch_size * self.num_replicas
        for start in range(first, first + self.num_steps_after(first) * global_size, global_size):
            global_batch: list[int] = order[start : start + global_size].tolist()
            num_missing = max(0, self.num_replicas - len(global_batch))
            first_samples: list[int] = order[:num_missing].tolist()
            filled = global_batch + list(islice(cycle(first_samples), num_missing))
            yield EpochIndices(replica_slice(filled, self.num_replicas, self.replica), epoch)

    def _order(self, epoch: int) -> Tensor:
        if not self.shuffle:
            return torch.arange(self.num_samples)
        # A hash, because seed + epoch would give (seed 0, epoch 1) and (seed 1, epoch 0) the same order.
        digest = hashlib.blake2b(f"{self.seed} {epoch}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        return torch.randperm(self.num_samples, generator=generator)


def replica_slice(global_batch: list[Item], num_replicas: int, replica: int) -> list[Item]:
    """One replica's contiguous slice of a global batch; the sizes of the slices differ by at most one."""
    size, num_larger = divmod(len(global_batch), num_replicas)
    start = replica * size + min(replica, num_larger)
    return global_batch[start : start + size + (replica < num_larger)]


def check_sizes(batch_size: int, num_replicas: int, replica: int) -> None:
    """Check the sizes of a sharded batch.

    Raises:
        ConfigError: see :class:`ShardedBatchSampler`.
    """
    if batch_size < 1:
        raise ConfigError(
            f"batch_size must be at least 1: got batch_size={batch_size}. "
            f"Use the number of samples per replica and step."
        )
    if num_replicas < 1:
        raise ConfigError(
            f"num_replicas must be at least 1: got num_replicas={num_replicas}. Use 1 without data parallelism."
        )
    if not 0 <= replica < num_replicas:
        raise ConfigError(
            f"replica must be between 0 and num_replicas - 1: got replica={replica}, num_replicas={num_replicas}. "
            f"Use this process's rank in its data-parallel group."
        )


def _check_dataset(num_samples: int, batch_size: int, num_replicas: int, drop_last: bool) -> None:
    if num_samples < 1:
        raise DataError(
            f"dataset must hold at least 1 sample: got num_samples={num_samples}. Check its path, split and filters."
        )
    if drop_last and num_samples < batch_size * num_replicas:
        raise DataError(
            f"drop_last needs at least one complete global batch: got num_samples={num_samples}, "
            f"batch_size={batch_size}, num_replicas={num_replicas} ({batch_size * num_replicas} samples per step), so "
            f"an epoch would have no step. Use drop_last=False or a smaller batch_size."
        )
