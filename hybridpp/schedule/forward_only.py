"""Forwards without backwards, for evaluation."""

from collections import deque
from collections.abc import Sequence, Set

from hybridpp.errors import ScheduleError
from hybridpp.schedule.action import Action, ActionKind, Programs
from hybridpp.schedule.counts import check_counts
from hybridpp.schedule.dependencies import needs
from hybridpp.schedule.interleaved import microbatch_groups
from hybridpp.schedule.list_scheduler import run_slots


def forward_only(placement: Sequence[int], num_microbatches: int) -> Programs:
    """One forward per micro-batch and stage, for any placement of stages.

    With stages 0 to 3 on the ranks 0 1 1 0, and 3 micro-batches::

        rank 0 | 0F0 0F1 0F2 .   .   3F0 3F1 3F2
        rank 1 | .   1F0 1F1 1F2 2F0 2F1 2F2 .

    A rank with several stages runs one group of micro-batches (see :func:`~hybridpp.schedule.interleaved`) through the
    first stage that can start, so that the number of activations that wait between two stages does not grow with ``m``,
    the number of micro-batches. With equal costs and ``p`` ranks the schedule takes ``m + p - 1 + (v - 1) max(m, p)``
    slots where ``v`` stages per rank are placed in a loop, and ``2 (m + p - 1)`` in a V.

    Args:
        placement: the rank of each stage.
        num_microbatches: micro-batches per batch.

    Raises:
        ScheduleError: a count is below 1, or a rank has no stage.
    """
    check_counts(num_stages=len(placement), num_microbatches=num_microbatches)
    num_ranks = max(placement) + 1
    idle = sorted(set(range(num_ranks)) - set(placement))
    if idle or min(placement) < 0:
        raise ScheduleError(f"every rank from 0 to the highest needs a stage: got placement={tuple(placement)}.")
    groups = microbatch_groups(num_ranks, num_microbatches)
    stages = [[stage for stage, at in enumerate(placement) if at == rank] for rank in range(num_ranks)]
    return run_slots([_RankRule(own_stages, len(placement), groups) for own_stages in stages])


class _RankRule:
    def __init__(self, stages: Sequence[int], num_stages: int, groups: Sequence[range]):
        self._num_stages = num_stages
        self._queues = [
            deque(
                (group, Action(stage, ActionKind.FORWARD, microbatch))
                for group, run in enumerate(groups)
                for microbatch in run
            )
            for stage in stages
        ]

    def choose(self, done: Set[Action]) -> Action | None:
        for queue in sorted(filter(None, self._queues), key=lambda queue: queue[0][0]):
            if all(need in done for need in needs(queue[0][1], self._num_stages)):
                return queue.popleft()[1]
        return None
