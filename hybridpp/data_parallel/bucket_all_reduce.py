"""The all-reduce of buckets over the replicas, overlapped with the last backward pass."""

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from hybridpp.cluster import Group, Work
from hybridpp.data_parallel.accumulator import GradientAccumulator
from hybridpp.data_parallel.bucket import Bucket
from hybridpp.errors import ConfigError


class BucketAllReduce:
    """Starts to reduce each bucket as soon as the last backward pass has completed it.

    Reductions start in the order of the buckets, which is the same on all replicas.

    Args:
        accumulator: the gradients.
        group: the replicas.
        dtype: of the messages; None: the accumulation dtype.
        reached: the parameters that a backward pass has reached on this rank; read when a reduction starts.
    """

    def __init__(
        self,
        accumulator: GradientAccumulator,
        group: Group,
        dtype: torch.dtype | None,
        reached: Collection[str],
    ):
        self._accumulator = accumulator
        self._buckets = accumulator.buckets
        self._group = group
        self._dtype = dtype
        self._reached = reached
        self._deferred: set[str] = set()
        self._in_last_backward = False
        self._num_launched = 0
        # Forgotten reductions, which may still write to their buckets.
        self._cancelled: list[tuple[Bucket, Work]] = []
        # What the flags of the latest reduction say; None: they have not been read.
        self._reached_anywhere: set[str] | None = None

    def begin(self, pending: Collection[str] | None) -> None:
        """Prepare for the last backward pass, which may add to the parameters in ``pending`` (None: to all)."""
        for bucket in self._buckets:
            bucket.pending = set(bucket.views) if pending is None else set(bucket.views).intersection(pending)
        self._deferred.clear()
        self._num_launched = 0
        self._in_last_backward = True
        self._launch(only_full=True)

    def defer(self, names: Iterable[str]) -> None:
        """Note that the running backward pass does not complete these gradients: :meth:`complete` follows."""
        self._deferred.update(names)

    def arrived(self, name: str) -> bool:
        """Note that autograd has added to a gradient; returns whether this is the last backward pass.

        Raises:
            ConfigError: the reduction of its bucket has started already.
        """
        if not self._in_last_backward:
            return False
        if name not in self._deferred:
            if self._accumulator.bucket_of[name].work is not None:
                raise ConfigError(
                    f"one backward pass added to the gradient of {name!r} again after its reduction had started. "
                    "Reentrant activation checkpointing does that for a module that is called twice: checkpoint "
                    "with use_reentrant=False."
                )
            self.complete(name)
        return True

    def complete(self, name: str) -> None:
        """Note that a gradient is complete."""
        if self._in_last_backward:
            self._accumulator.bucket_of[name].pending.discard(name)
            self._launch(only_full=True)

    def launch_remaining(self) -> None:
        """Start the remaining reductions after the last backward pass. Collective: the group."""
        if self._in_last_backward:
            self._launch(only_full=False)

    def _launch(self, only_full: bool) -> None:
        for bucket in self._buckets[self._num_launched :]:
            if only_full and bucket.pending:
                return
            self._accumulator.zero_stale([bucket])
            bucket.launch_reduce(self._group, self._reached, self._dtype)
            self._reached_anywhere = None
            self._num_launched += 1

    def finish(self) -> None:
        """Start the remaining reductions, and wait for all. Collective: the group."""
        if not self._in_last_backward:
            self._num_launched = 0
        self._launch(only_full=False)
        for bucket in self._buckets:
            bucket.wait()
        self._in_last_backward = False

    def cancel(self) -> None:
        """Forget running reductions, without waiting: a replica that failed never joins them. See :meth:`settle`."""
        self._in_last_backward = False
        for bucket in self._buckets:
            if bucket.work is not None:
                self._cancelled.append((bucket, bucket.work))
            bucket.cancel()

    def settle(self) -> None:
        """Wait for forgotten reductions; what they wrote counts as nothing."""
        for bucket, work in self._cancelled:
            work.wait()
            self._accumulator.mark_written(bucket)
        self._cancelled.clear()

    def flags(self) -> Tensor:
        """A flag per parameter, on the device: not 0 if a backward pass reached it on any replica."""
        return torch.cat([bucket.flags for bucket in self._buckets])

    def take_flags(self, flags: Sequence[float]) -> None:
        """Take over what the host has read of :meth:`flags`, after :meth:`finish`."""
        names = [name for bucket in self._buckets for name in bucket.views]
        self._reached_anywhere = {name for name, flag in zip(names, flags, strict=True) if flag}

    def reached_anywhere(self) -> set[str]:
        """The parameters that a backward pass reached on any replica, after :meth:`finish`.

        The host waits for the device, unless it has read the flags already.
        """
        if self._reached_anywhere is None:
            self.take_flags(self.flags().tolist())
        assert self._reached_anywhere is not None, "it was just set"
        return self._reached_anywhere
