"""A time that no schedule of given costs and placement can undercut."""

from collections.abc import Sequence
from math import floor, inf

from hybridpp.schedule import ActionKind
from hybridpp.simulate.costs import Costs


def lower_bound_ms(
    costs: Costs, rank_of: Sequence[int], num_microbatches: int, caps: Sequence[float] | None = None
) -> float:
    """A lower bound of the step time of every schedule that places the stages so, in any order.

    It is the largest of four numbers of each rank, whose first stage is ``s``:

    - Whatever the rank does first is a forward of ``s``: its other stages, and all backward passes, come after one. So
      it begins when a micro-batch has come through the stages before ``s``. Then it computes all that it has to: each
      backward pass as B, or as I and W, whichever is shorter.
    - The last F, I or B of the rank is an I or B of ``s``, since those of its other stages are followed by one. Until
      then it has computed all its F and I. The gradient of ``s`` goes on to stage 0, and each stage on the way still
      has to do the W of that micro-batch.
    - One micro-batch has to go through all stages, and back.
    - A stage holds what it has of a micro-batch from the start of its F to the start of its I or B: at least as long as
      the micro-batch takes to the last stage and back. Bytes times milliseconds of all micro-batches, over the bytes
      that the rank can hold, are a time between its first F and its last I or B.

    A rank's time for messages counts, too, but for the first one that it receives and the last one that it sends: these
    may fall outside its own work.

    Args:
        costs: of each stage. Recomputation only adds to them.
        rank_of: the rank of each stage.
        num_microbatches: micro-batches per batch.
        caps: bytes that each rank can hold for micro-batches; None: any.
    """
    bound = _Bound(costs, rank_of, num_microbatches)
    return max(bound.of_rank(rank, inf if caps is None else caps[rank]) for rank in set(rank_of))


class _Bound:
    def __init__(self, costs: Costs, rank_of: Sequence[int], num_microbatches: int):
        self._costs, self._rank_of, self._num_microbatches = costs, rank_of, num_microbatches
        stages = range(len(rank_of))
        self._forward = [costs.compute_ms(stage, ActionKind.FORWARD) for stage in stages]
        unsplit = [costs.compute_ms(stage, ActionKind.BACKWARD) for stage in stages]
        inputs = [costs.compute_ms(stage, ActionKind.INPUT_GRADIENT) for stage in stages]
        weights = [costs.compute_ms(stage, ActionKind.WEIGHT_GRADIENT) for stage in stages]
        # Until the gradient of the input is there, and until that of the weights is.
        self._gradient = [min(pair) for pair in zip(unsplit, inputs, strict=True)]
        self._backward = [min(b, i + w) for b, i, w in zip(unsplit, inputs, weights, strict=True)]

    def of_rank(self, rank: int, cap: float) -> float:
        own = [stage for stage, other in enumerate(self._rank_of) if other == rank]
        first, count = own[0], self._num_microbatches
        arrival = sum(self._forward[stage] + self._message(stage) for stage in range(first))
        posts = self._posts_ms(own)
        work = count * sum(self._forward[stage] + self._backward[stage] for stage in own) + posts
        shortest_reduction = min(self._costs.reducing_ms(stage) for stage in own)
        until_gradient = count * sum(self._forward[stage] + self._gradient[stage] for stage in own) + posts
        last = len(self._rank_of) - 1
        path = sum(self._forward[stage] + self._message(stage) for stage in range(last)) + self._forward[last]
        return max(
            arrival + work + shortest_reduction,
            self._back_from(first, arrival + until_gradient - self._gradient[first]),
            self._back_from(last, path),
            self._back_from(first, arrival + self._holding_ms(own, cap)),
        )

    def _holding_ms(self, own: Sequence[int], cap: float) -> float:
        """The time in which a rank can hold what all micro-batches need it to hold."""
        sizes = [self._least_held(stage) for stage in own]
        if len(own) == 1 and 0 < sizes[0] <= cap < inf:
            # Micro-batches are whole; sums of bytes are rounded.
            cap = floor(cap / sizes[0] * (1 + 1e-9)) * sizes[0]
        if not 0 < cap < inf:
            return 0.0
        needed = sum(size * self._return_ms(stage) for size, stage in zip(sizes, own, strict=True))
        return self._num_microbatches * needed / cap

    def _least_held(self, stage: int) -> float:
        return self._costs.held_bytes(stage, ActionKind.FORWARD) - max(0.0, self._costs.recompute_saves_bytes(stage))

    def _return_ms(self, stage: int) -> float:
        """From the start of a stage's F until its I or B can start."""
        later = range(stage + 1, len(self._rank_of))
        there = sum(self._message(other - 1) + self._forward[other] for other in later)
        back = sum(self._gradient[other] + self._message(other - 1) for other in later)
        return self._forward[stage] + there + back

    def _back_from(self, stage: int, begin: float) -> float:
        """The latest end of the backward passes of a micro-batch, if that of this stage begins at a time."""
        latest = 0.0
        for current in range(stage, -1, -1):
            latest = max(latest, begin + self._backward[current] + self._costs.reducing_ms(current))
            begin += self._gradient[current] + (self._message(current - 1) if current else 0.0)
        return latest

    def _message(self, stage: int) -> float:
        """Time of a message over the boundary behind a stage."""
        crosses = self._rank_of[stage] != self._rank_of[stage + 1]
        return self._costs.message_ms(stage, stage + 1) if crosses else 0.0

    def _posts_ms(self, own: Sequence[int]) -> float:
        """The rank's time for messages between its first action and the last that it must do."""
        total = longest = 0.0
        for stage in own:
            others = [stage + step for step in (-1, 1) if 0 <= stage + step < len(self._rank_of)]
            # Over each boundary, one receive and one send of each micro-batch.
            crossing = sum(self._rank_of[other] != self._rank_of[stage] for other in others)
            total += 2 * crossing * self._num_microbatches * self._costs.posting_ms(stage)
            if crossing:
                longest = max(longest, self._costs.posting_ms(stage))
        return max(0.0, total - 2 * longest)
