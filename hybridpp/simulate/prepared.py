"""Programs that are simulated with many costs: put in the order of their dependencies once."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hybridpp.schedule import Action, ActionKind, Programs, peak_activations, placement
from hybridpp.schedule.dependencies import needs, result, walk
from hybridpp.schedule.lower import FILLS_GRADIENTS
from hybridpp.simulate.costs import Costs

KINDS = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
# A step that has one period more than this many times the ranks is continued: each period repeats the one before.
_REPEATS = 4


class StepEnds(NamedTuple):
    """When the ranks of a step are done, without what they reduce over replicas.

    Attributes:
        busy_ms: by rank, the time in which it computes.
        end_ms: when the last action ends.
        last_ms: by stage, when its last backward pass or weight gradient ends: its gradients are complete.
    """

    busy_ms: tuple[float, ...]
    end_ms: float
    last_ms: tuple[float, ...]

    def reduced_ms(self, ranks: Sequence[int], reduce_ms: Sequence[float]) -> float:
        """When the step ends, with the reductions of each stage's gradients: one after the other on a rank.

        Args:
            ranks: of each stage.
            reduce_ms: of each stage.
        """
        ends = dict.fromkeys(ranks, 0.0)
        latest = self.end_ms
        for complete, stage in sorted((last, stage) for stage, last in enumerate(self.last_ms)):
            if reduce_ms[stage] > 0:
                ends[ranks[stage]] = max(ends[ranks[stage]], complete) + reduce_ms[stage]
                latest = max(latest, ends[ranks[stage]])
        return latest


class _Step(NamedTuple):
    """An action. ``source``: the number of the action whose message it waits for; -1: there is none."""

    rank: int
    cost: int
    source: int
    boundary: int
    received: int
    sent: int


class PreparedPrograms:
    """Programs of compute actions, ready to be simulated.

    Args:
        programs: of each rank; they must have been checked.

    Attributes:
        ranks: of each stage.
        steps: all actions, each after what it waits for.
        last: of each stage, the number of the step in which its gradients are complete.
    """

    def __init__(self, programs: Programs):
        self.programs = programs
        self.ranks = placement(programs)
        self.steps: list[_Step] = []
        self.last = [0] * len(self.ranks)
        numbers: dict[Action, int] = {}
        for rank, index in walk(programs):
            action = programs[rank][index]
            if action.kind in FILLS_GRADIENTS:
                self.last[action.stage] = len(self.steps)
            # What the rank itself did is done when the rank is free.
            others = [need for need in needs(action, len(self.ranks)) if self.ranks[need.stage] != rank]
            source, boundary = -1, -1
            if others:
                source, boundary = numbers[others[0]], min(action.stage, others[0].stage)
            numbers[result(action)] = len(self.steps)
            kind = KINDS.index(action.kind)
            sent = self._sends_to(action.stage, kind, rank)
            self.steps.append(_Step(rank, 4 * action.stage + kind, source, boundary, len(others), sent))

    def _sends_to(self, stage: int, kind: int, rank: int) -> int:
        target = stage + (1, -1, -1, 0)[kind]
        return int(0 <= target < len(self.ranks) and self.ranks[target] != rank)

    def ends(self, costs: Costs) -> StepEnds:
        """When ranks are done, exactly as :func:`~hybridpp.simulate.simulate` says without ``reduce_ms``."""
        num_stages = len(self.ranks)
        duration = [costs.compute_ms(stage, kind) for stage in range(num_stages) for kind in KINDS]
        message = [costs.message_ms(stage, stage + 1) for stage in range(num_stages - 1)]
        post = [costs.posting_ms(cost // 4) for cost in range(4 * num_stages)]
        free, busy = [0.0] * len(self.programs), [0.0] * len(self.programs)
        made = [0.0] * len(self.steps)
        for number, (rank, cost, source, boundary, received, sent) in enumerate(self.steps):
            start = free[rank]
            if source >= 0:
                arrival = made[source] + message[boundary]
                start += received * post[cost]
                start = max(arrival, start)
            made[number] = end = start + duration[cost]
            busy[rank] += end - start
            free[rank] = end + sent * post[cost]
        return StepEnds(tuple(busy), max(made), tuple(made[index] for index in self.last))


class PreparedStep:
    """A schedule's step of some micro-batches, ready to be simulated.

    Of many micro-batches, a step of fewer is simulated, and continued: in the steady state, one period is as long as
    the next. Two steps that are a period apart say how long that is.

    Args:
        make: the programs of a number of micro-batches.
        num_ranks: of the pipeline.
        num_microbatches: of the step.
        repeats: whether the schedule may be continued: it is made for any number of micro-batches.

    Attributes:
        num_microbatches: of the step.
        ranks: of each stage.
    """

    def __init__(
        self, make: Callable[[int], PreparedPrograms], num_ranks: int, num_microbatches: int, repeats: bool = True
    ):
        self.num_microbatches = num_microbatches
        enough = _REPEATS * num_ranks + num_microbatches % num_ranks
        made = num_microbatches
        self._fewer: PreparedPrograms | None = None
        if repeats and num_microbatches > enough:
            # A multiple of the ranks, as some schedules need it.
            made, self._fewer = enough, make(enough - num_ranks)
        self._more = make(made)
        self._beyond = (num_microbatches - made) / num_ranks
        self.ranks = self._more.ranks

    @property
    def holds_more(self) -> bool:
        """Whether ranks hold more, the more micro-batches there are: then fewer do not show what they hold."""
        fewer = self._fewer
        return fewer is not None and peak_activations(fewer.programs) != peak_activations(self._more.programs)

    @property
    def programs(self) -> Programs:
        """Those that are simulated."""
        return self._more.programs

    def ends(self, simulated: Callable[[PreparedPrograms], StepEnds]) -> StepEnds:
        """When the ranks are done.

        Args:
            simulated: simulates programs, such as ``lambda programs: programs.ends(costs)``.
        """
        more = simulated(self._more)
        return more if self._fewer is None else continued(simulated(self._fewer), more, self._beyond)


def continued(fewer: StepEnds, more: StepEnds, periods: float) -> StepEnds:
    """A step that has some periods more than ``more``, which has one more than ``fewer``.

    A period is as long as it was between these two, and no shorter than what the busiest rank computes in it.
    """
    work = [after - before for before, after in zip(fewer.busy_ms, more.busy_ms, strict=True)]

    def later(before: float, after: float) -> float:
        return after + periods * max(after - before, *work)

    return StepEnds(
        tuple(after + periods * own for after, own in zip(more.busy_ms, work, strict=True)),
        later(fewer.end_ms, more.end_ms),
        tuple(map(later, fewer.last_ms, more.last_ms)),
    )
