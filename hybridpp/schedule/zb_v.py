"""Two stages per rank in a V: the first rank also has the last stage."""

from collections import deque
from collections.abc import Set

from hybridpp.schedule.action import Action, ActionKind, Programs
from hybridpp.schedule.counts import check_counts
from hybridpp.schedule.list_scheduler import SplitBackwardState, run_slots


def zb_v(num_ranks: int, num_microbatches: int) -> Programs:
    """ZB-V (Qi et al. 2024, arXiv:2405.15362): two stages per rank, placed in a V, with split backwards.

    With 3 ranks and 3 micro-batches::

        rank 0 | 0F0 0F1 0F2 .   .   5F0 5I0 5F1 5I1 5F2 5I2 0I0 5W0 0I1 5W1 0I2 5W2 0W0 0W1 0W2
        rank 1 | .   1F0 1F1 1F2 4F0 .   4F1 4I0 4F2 4I1 1I0 4I2 1I1 4W0 1I2 4W1 1W0 4W2 1W1 1W2
        rank 2 | .   .   2F0 3F0 2F1 3F1 2F2 3F2 3I0 2I0 3I1 2I1 3I2 2I2 3W0 2W0 3W1 2W1 3W2 2W2

    Rank ``r`` of ``p`` has the stages ``r`` and ``2 p - 1 - r``, and holds at most ``min(2 m, 2 p)`` of their
    activations for ``m`` micro-batches: as much memory as 1F1B's first rank, whose stages are twice as large. With
    equal costs the schedule takes ``p - 1 + max(6 m, 4 m + 2 p, 2 m + 3 p)`` slots, of which a rank computes in
    ``6 m``: for ``m >= p`` it idles ``(p - 1) / (6 m + p - 1)`` of the time.

    A rank takes the first of these that can start: a forward of its second stage, the input gradient of the oldest
    micro-batch, a forward of its first stage, the oldest weight gradient. If only the limit of activations prevents a
    forward of the second stage, a weight gradient runs first: otherwise the last micro-batch would be delayed, and with
    it the end of the step.

    Raises:
        ScheduleError: a count is below 1.
    """
    check_counts(num_ranks=num_ranks, num_microbatches=num_microbatches)
    return run_slots([_RankRule(rank, num_ranks, num_microbatches) for rank in range(num_ranks)])


class _RankRule:
    def __init__(self, rank: int, num_ranks: int, num_microbatches: int):
        self._held = SplitBackwardState(num_stages=2 * num_ranks, limit=2 * num_ranks)
        first, second = rank, 2 * num_ranks - 1 - rank

        def queue(stage: int, kind: ActionKind) -> deque[Action]:
            return deque(Action(stage, kind, microbatch) for microbatch in range(num_microbatches))

        self._down, self._up = queue(first, ActionKind.FORWARD), queue(second, ActionKind.FORWARD)
        self._gradients = queue(first, ActionKind.INPUT_GRADIENT), queue(second, ActionKind.INPUT_GRADIENT)

    def choose(self, done: Set[Action]) -> Action | None:
        if self._held.is_full and self._up and self._held.is_ready(self._up[0], done):
            weight_gradient = self._held.take_weight_gradient()
            if weight_gradient is not None:
                return weight_gradient
        oldest_first = sorted(filter(None, self._gradients), key=lambda queue: queue[0].microbatch or 0)
        for queue in (self._up, *oldest_first, self._down):
            if queue and self._held.can_start(queue[0], done):
                return self._held.take(queue)
        return self._held.take_weight_gradient()
