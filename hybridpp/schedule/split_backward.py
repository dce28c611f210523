"""Split backwards, so that ranks compute weight gradients while they would otherwise idle."""

from collections import deque
from collections.abc import Sequence, Set

from hybridpp.errors import ScheduleError
from hybridpp.schedule.action import Action, ActionKind, Program, Programs
from hybridpp.schedule.check import check_program
from hybridpp.schedule.dependencies import count_stages, result
from hybridpp.schedule.list_scheduler import SplitBackwardState, run_slots
from hybridpp.schedule.memory import peak_activations


def fill_weight_gradients(
    programs: Programs, limits: Sequence[int], num_unsplit: Sequence[int] | None = None
) -> Programs:
    """Programs with split backwards: I in the place of B, and W as soon as its rank would otherwise idle.

    F and I keep their order. A W also precedes a forward that would exceed the rank's limit of activations, which are
    held from F until W; the oldest W comes first. Slots are assigned as if F, I and W took equally long. In programs
    that are already split, W is scheduled anew.

    Args:
        programs: compute programs that :func:`~hybridpp.schedule.check_program` accepts.
        limits: the most activations to hold, for each rank.
        num_unsplit: how many of the first micro-batches keep an unsplit backward, by rank; None: none.

    Raises:
        ScheduleError: the programs are invalid, a limit is below what a rank holds between F and I, or the number of
            values differs from the number of ranks.
    """
    check_program(programs)
    counts = [0] * len(programs) if num_unsplit is None else num_unsplit
    for what, numbers in (("limits", limits), ("num_unsplit", counts)):
        if len(numbers) != len(programs):
            raise ScheduleError(f"{what} needs one number per rank: got {len(numbers)} for {len(programs)} ranks.")
    unsplit = tuple(_unsplit(program) for program in programs)
    for rank, (limit, peak) in enumerate(zip(limits, peak_activations(unsplit), strict=True)):
        if limit < peak:
            raise ScheduleError(
                f"rank {rank} cannot hold fewer activations than without splitting: got a limit of {limit}, and it "
                f"holds {peak}. Use {peak} or more."
            )
    num_stages = count_stages(programs)
    split = [_split(program, count) for program, count in zip(unsplit, counts, strict=True)]
    return run_slots([_FillRule(program, num_stages, limit) for program, limit in zip(split, limits, strict=True)])


def _unsplit(program: Program) -> Program:
    """The program with B in the place of each I, and without W."""
    return tuple(
        action._replace(kind=ActionKind.BACKWARD) if action.kind is ActionKind.INPUT_GRADIENT else action
        for action in program
        if action.kind is not ActionKind.WEIGHT_GRADIENT
    )


def _split(program: Program, num_unsplit: int) -> Program:
    """The program with I in the place of B, except for the first ``num_unsplit`` micro-batches."""
    return tuple(result(action) if (action.microbatch or 0) >= num_unsplit else action for action in program)


class _FillRule:
    """Runs a program's actions in order, and weight gradients in between."""

    def __init__(self, program: Program, num_stages: int, limit: int):
        self._todo = deque(program)
        self._held = SplitBackwardState(num_stages, limit)

    def choose(self, done: Set[Action]) -> Action | None:
        if self._todo and self._held.can_start(self._todo[0], done):
            return self._held.take(self._todo)
        return self._held.take_weight_gradient()
