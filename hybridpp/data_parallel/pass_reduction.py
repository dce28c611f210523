"""The reduction of buckets after every backward pass (ZeRO 2 and 3)."""

from collections import deque
from collections.abc import Collection
from typing import Any

from hybridpp.data_parallel.bucket import Bucket
from hybridpp.data_parallel.bucket_reduction import BucketReduction

# Buckets that have memory while they are reduced; one more is being filled.
_MAX_RUNNING = 2


class PassReduction(BucketReduction):
    """Reduces every bucket of a stage after each of its backward passes, and adds the sum to the replica's segment.

    So a rank holds the gradients of a few buckets only, beside its segments of the sums. All replicas must run the same
    passes in the same order; a replica without a micro-batch for a pass calls :meth:`begin` and
    :meth:`launch_remaining` all the same. Shared gradients are kept complete, and reduced at the end.

    Args:
        args, options: as of :class:`BucketReduction`. After ``on_launch``, gradients start new sums in a bucket.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        # The buckets of the running pass that are not reduced yet, in order.
        self._waiting: deque[Bucket] = deque()
        self._running: deque[Bucket] = deque()

    def reset(self) -> None:
        super().reset()
        self._waiting = deque()

    def begin(self, stage: int | None, pending: Collection[str] | None) -> None:
        """Prepare for a backward pass of a stage, or of all (None).

        Args:
            stage: of the pass.
            pending: the parameters that it may add to; None: to all of the stage.
        """
        self.end_pass()
        self._waiting = deque(bucket for bucket in self._buckets if stage is None or stage in bucket.layout.stages)
        for bucket in self._waiting:
            bucket.pending = set(bucket.views) if pending is None else set(bucket.views).intersection(pending)
        if pending is None or pending:
            self._deferred.clear()
        # Else the pass runs on other replicas only: what they defer is what the last pass here deferred.
        self._done_units.clear()
        if not self._by_unit:
            self._launch_complete()

    def _is_launched(self, bucket: Bucket) -> bool:
        return bucket not in self._waiting

    def launch_remaining(self, stage: int | None) -> None:
        """Start the remaining reductions after a backward pass of a stage, or of all (None).

        Collective: the group.
        """
        self.end_pass()

    def end_pass(self) -> None:
        """Start the remaining reductions of the pass that has begun last, if there is one. Collective: the group."""
        while self._waiting:
            self._reduce(self._waiting.popleft())
        for bucket in self._buckets:
            bucket.pending = None

    def launch_unit(self, unit: int) -> None:
        self._done_units.add(unit)
        for bucket in [one for one in self._waiting if self._is_done(one)]:
            self._waiting.remove(bucket)
            self._reduce(bucket)

    def _launch_complete(self) -> None:
        while self._waiting and not self._waiting[0].pending:
            self._reduce(self._waiting.popleft())

    def _reduce(self, bucket: Bucket) -> None:
        while len(self._running) >= _MAX_RUNNING:
            self._collect(self._running.popleft())
        super()._reduce(bucket)
        if bucket.each_pass:
            self._running.append(bucket)

    def _collect(self, bucket: Bucket) -> None:
        """Add what was reduced to the replica's segment, and free the buffer, unless a later pass has done so."""
        if bucket.work is not None:
            bucket.wait()
            self._accumulator.free(bucket)

    def end_passes(self) -> None:
        self.end_pass()
        while self._running:
            self._collect(self._running.popleft())

    def _launch_all(self) -> None:
        self.end_passes()
        self._launch_flags()

    def cancel(self) -> None:
        super().cancel()
        self._running.clear()
