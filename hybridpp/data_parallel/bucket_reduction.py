"""The reduction of buckets over the replicas, overlapped with the last backward pass."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator

import torch

from hybridpp.cluster import Work
from hybridpp.data_parallel.bucket import Bucket
from hybridpp.data_parallel.reducible_sums import ReducibleSums
from hybridpp.data_parallel.replicas import Replicas
from hybridpp.data_parallel.shared_gradients import ReachedFlags
from hybridpp.errors import ConfigError


class BucketReduction:
    """Starts to reduce each bucket as soon as the last backward pass has completed it.

    Reductions start in the order of the buckets, which is the same on all replicas. Shared gradients, of which ranks of
    one replica hold summands, are summed over those first, so their buckets are reduced last.

    Args:
        accumulator: the gradients.
        group: the replicas.
        dtype: of the messages; None: the accumulation dtype.
        reached: the parameters that a backward pass has reached on this rank; read when a reduction starts.
        on_launch: called with a bucket after its reduction has begun.
        scatter: whether a replica gets its own segment of each sum only.
        by_unit: whether weights are gathered by unit. Then a unit's buckets are reduced when the pass is done with it:
            replicas would wait for each other if gathers and reductions did not have one order.
    """

    def __init__(
        self,
        accumulator: ReducibleSums,
        group: Replicas,
        dtype: torch.dtype | None,
        reached: Collection[str],
        on_launch: Callable[[Bucket], None],
        *,
        scatter: bool,
        by_unit: bool = False,
    ):
        self._accumulator = accumulator
        self._shared = [bucket for bucket in accumulator.buckets if bucket.layout.is_shared]
        self._buckets = [bucket for bucket in accumulator.buckets if not bucket.layout.is_shared]
        self._group = group
        self._dtype = dtype
        self._reached, self._on_launch = reached, on_launch
        self._scatter, self._by_unit = scatter, by_unit
        # The units that the running pass is done with.
        self._done_units: set[int] = set()
        self._reduced_at_end: set[Bucket] = set()
        self._deferred: set[str] = set()
        self._of_unit: defaultdict[int, list[Bucket]] = defaultdict(list)
        for bucket in self._buckets:
            for unit in bucket.layout.units:
                self._of_unit[unit].append(bucket)
        self._stages = frozenset(stage for bucket in self._buckets for stage in bucket.layout.stages)
        # Whether a last backward pass has begun; the stages of which one has begun, and of which it has ended.
        self._is_begun = False
        self._begun: set[int] = set()
        self._done: set[int] = set()
        self._num_launched = 0
        # Forgotten reductions, which may still write to their buckets.
        self._cancelled: list[tuple[Bucket | None, Work]] = []
        self._names = [name for bucket in accumulator.buckets for name in bucket.views]
        # Whether a backward pass reached each parameter here; on any replica when their sum is there.
        self._flags = ReachedFlags([], torch.zeros(0))
        self._flags_work: Work | None = None

    def reset(self) -> None:
        """Prepare for the backward passes of a step."""
        for bucket in self._buckets:
            bucket.pending = None
        self._is_begun = False
        self._begun.clear()
        self._done.clear()
        self._num_launched = 0

    def names_of(self, stage: int | None) -> set[str]:
        """The parameters that a stage uses; None: all."""
        return {name for bucket in self._buckets if stage in (None, *bucket.layout.stages) for name in bucket.views}

    def begin(self, stage: int | None, pending: Collection[str] | None) -> None:
        """Prepare for the last backward pass of a stage, or of all (None).

        Args:
            stage: of the pass.
            pending: the parameters that it may add to; None: to all of the stage.
        """
        self._is_begun = True
        self._begun.update(self._stages if stage is None else (stage,))
        for bucket in self._buckets:
            stages = bucket.layout.stages
            if bucket.pending is None and (stage is None or (stages and self._begun.issuperset(stages))):
                bucket.pending = set(bucket.views) if pending is None else set(bucket.views).intersection(pending)
        self._deferred.clear()
        self._done_units.clear()
        if not self._by_unit:
            self._launch_complete()

    def defer(self, names: Iterable[str]) -> None:
        """Note that the running backward pass does not complete these gradients: :meth:`complete` follows."""
        self._deferred.update(names)

    def arrived(self, name: str) -> bool:
        """Note that autograd has added to a gradient; returns whether this is the last backward pass that does.

        Raises:
            ConfigError: the reduction of its bucket has started already.
        """
        bucket = self._accumulator.bucket_of[name]
        if bucket.pending is None:
            return False
        if name not in self._deferred:
            if self._is_launched(bucket):
                raise ConfigError(
                    f"one backward pass added to the gradient of {name!r} again after its reduction had started. "
                    "A pass inside of it did so before (reentrant activation checkpointing of a module that is called "
                    "twice, or a backward in Python that runs one), or it goes through calls of the model that an "
                    "earlier pass went through. Checkpoint with use_reentrant=False, run one pass for all calls "
                    "together, or use zero_stage=1."
                )
            self.complete(name)
        return True

    def _is_launched(self, bucket: Bucket) -> bool:
        """Whether the reduction of what the running pass adds to has begun."""
        return bucket.work is not None

    def complete(self, name: str) -> None:
        """Note that a gradient is complete, if this is the last backward pass that adds to it."""
        bucket = self._accumulator.bucket_of[name]
        if bucket.pending is not None:
            bucket.pending.discard(name)
            if not self._by_unit:
                self._launch_complete()

    def reduce_at_end(self, names: Iterable[str]) -> None:
        """Reduce these parameters' buckets at the end of a pass: other code than that of units uses them, too."""
        self._reduced_at_end.update(self._accumulator.bucket_of[name] for name in names if name in self._names)

    def launch_unit(self, unit: int) -> None:
        """Start to reduce what a unit has for itself, when the running pass is done with it. Collective: the group."""
        self._done_units.add(unit)
        for bucket in self._buckets:
            if bucket.pending is not None and self._is_done(bucket):
                bucket.pending.clear()
        self._launch_complete()

    def pending(self, unit: int) -> Iterator[str]:
        """The parameters that a unit has for itself which the running pass has not reached."""
        return (name for bucket in self._of_unit[unit] for name in bucket.pending or ())

    def _is_done(self, bucket: Bucket) -> bool:
        """Whether the running pass is done with all units that use a bucket."""
        units = bucket.layout.units
        if bucket in self._reduced_at_end:
            return False
        return bool(units) and self._done_units.issuperset(units) and self._deferred.isdisjoint(bucket.views)

    def launch_remaining(self, stage: int | None) -> None:
        """Start the remaining reductions after the last backward pass of a stage, or of all (None).

        Collective: the group, in the order of the stages.
        """
        if not self._is_begun:
            return
        self._done.update(self._stages if stage is None else (stage,))
        if self._done.issuperset(self._stages):
            self._launch_all()
            return
        for bucket in self._buckets:
            if bucket.layout.stages and self._done.issuperset(bucket.layout.stages):
                bucket.pending = set()
        self._launch_complete()

    def _launch_complete(self) -> None:
        """Start to reduce complete buckets, in order."""
        for bucket in self._buckets[self._num_launched :]:
            if bucket.pending is None or bucket.pending:
                return
            self._reduce(bucket)
            self._num_launched += 1

    def _launch_all(self) -> None:
        for bucket in self._buckets[self._num_launched :]:
            self._reduce(bucket)
            self._num_launched += 1
        self._launch_flags()

    def _launch_flags(self, shared: ReachedFlags | None = None) -> None:
        """Start to reduce the flags: with those of shared gradients, once these are summed, if there are any."""
        if not self._names or self._flags_work is not None or (self._shared and shared is None):
            return
        apart = set() if shared is None else set(shared.names)
        names = [name for name in self._names if name not in apart]
        flags = torch.tensor([float(name in self._reached) for name in names])
        flags = flags.to(self._accumulator.buckets[0].flat.device, non_blocking=True)
        if shared is not None and apart:
            names, flags = [*names, *shared.names], torch.cat([flags, shared.flags])
        self._flags = ReachedFlags(names, flags)
        self._flags_work = self._group.all_reduce(flags)

    def _reduce(self, bucket: Bucket) -> None:
        self._accumulator.zero_stale([bucket])
        bucket.launch_reduce(self._group, self._dtype, scatter=self._scatter)
        self._on_launch(bucket)

    def finish(self, sum_shared: Callable[[], ReachedFlags]) -> ReachedFlags:
        """Start the remaining reductions, and wait for all. Collective: the group, and those of ``sum_shared``.

        Args:
            sum_shared: sums shared gradients over the ranks of this replica; returns which of them these reached.

        Returns:
            Which parameters a backward pass reached on any replica, and on any rank that shares them.
        """
        self._launch_all()
        self._launch_flags(sum_shared())
        for bucket in self._shared:
            self._reduce(bucket)
        for bucket in self._accumulator.buckets:
            if bucket.work is not None:
                bucket.wait()
            if bucket.frees:
                bucket.complete()
                self._accumulator.free(bucket)
        if self._flags_work is not None:
            self._flags_work.wait()
        self._flags_work = None
        self.reset()
        return self._flags

    def end_passes(self) -> None:
        """After the passes of a call that does not complete the gradients: wait for what runs. Collective."""

    def cancel(self) -> None:
        """Forget running reductions, without waiting: a replica that failed never joins them. See :meth:`settle`."""
        self.reset()
        for bucket in self._accumulator.buckets:
            if bucket.work is not None:
                self._cancelled.append((bucket, bucket.work))
            bucket.cancel()
        if self._flags_work is not None:
            self._cancelled.append((None, self._flags_work))
            self._flags_work = None

    def settle(self) -> None:
        """Wait for forgotten reductions; what they wrote counts as nothing."""
        for bucket, work in self._cancelled:
            work.wait()
            if bucket is not None:
                self._accumulator.mark_written(bucket)
        self._cancelled.clear()
