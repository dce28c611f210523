"""A time that no schedule of given costs and placement can undercut."""

from collections.abc import Sequence

from hybridpp.schedule import ActionKind
from hybridpp.simulate.costs import Costs


def lower_bound_ms(costs: Costs, rank_of: Sequence[int], num_microbatches: int) -> float:
    """A lower bound of the step time of every schedule that places the stages so, in any order, with any memory.

    It is the largest of three numbers of each rank, whose first stage is ``s``:

    - Whatever the rank does first is a forward of ``s``: its other stages, and all backward passes, come after one. So
      it begins when a micro-batch has come through the stages before ``s``. Then it computes all that it has to: each
      backward pass as B, or as I and W, whichever is shorter.
    - The last F, I or B of the rank is an I or B of ``s``, since those of its other stages are followed by one. Until
      then it has computed all its F and I. The gradient of ``s`` goes on to stage 0, and each stage on the way still
      has to do the W of that micro-batch.
    - One micro-batch has to go through all stages, and back.

    A rank's time for messages counts, too, but for the first one that it receives and the last one that it sends: these
    may fall outside its own work.

    Args:
        costs: of each stage. Recomputation only adds to them.
        rank_of: the rank of each stage.
        num_microbatches: micro-batches per batch.
    """
    bound = _Bound(costs, rank_of, num_microbatches)
    return max(bound.of_rank(rank) for rank in set(rank_of))


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

    def of_rank(self, rank: int) -> float:
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
        )

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
