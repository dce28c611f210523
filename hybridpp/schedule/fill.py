"""Split backwards, so that ranks work out weight gradients where they would idle."""

from collections import deque
from collections.abc import Sequence, Set

from hybridpp.errors import ScheduleError
from hybridpp.schedule.action import Action, Kind, Program, Programs
from hybridpp.schedule.check import check_program
from hybridpp.schedule.memory import peak_activations
from hybridpp.schedule.order import count_stages, result
from hybridpp.schedule.slots import SplitBackward, run_slots


def fill_weight_gradients(
    programs: Programs, limits: Sequence[int], num_whole: Sequence[int] | None = None
) -> Programs:
    """Programs with backwards in two: I where B was, and W as soon as its rank would idle without it.

    F and I keep their order. A W also goes ahead of a forward that would be one activation too many, so what a rank
    holds, from F until W, stays within its limit; the oldest goes first. Places are chosen as if F, I and W took
    equally long. Programs that are split already have their W placed anew.

    Args:
        programs: compute programs that :func:`~hybridpp.schedule.check_program` accepts.
        limits: the most activations to hold, for each rank.
        num_whole: for each rank, of how many micro-batches, the first ones, the backward stays in one; None: of none.

    Raises:
        ScheduleError: the programs are no good, a limit is below what a rank holds between its F and I anyway, or there
            is not one number per rank.
    """
    check_program(programs)
    counts = [0] * len(programs) if num_whole is None else num_whole
    for what, numbers in (("limits", limits), ("num_whole", counts)):
        if len(numbers) != len(programs):
            raise ScheduleError(f"{what} needs one number per rank: got {len(numbers)} for {len(programs)} ranks.")
    whole = tuple(_whole(program) for program in programs)
    for rank, (limit, peak) in enumerate(zip(limits, peak_activations(whole), strict=True)):
        if limit < peak:
            raise ScheduleError(
                f"rank {rank} may hold no fewer activations than without splitting: got a limit of {limit} where it "
                f"holds {peak}. Use {peak} or more."
            )
    num_stages = count_stages(programs)
    split = [_split(program, count) for program, count in zip(whole, counts, strict=True)]
    return run_slots([_Filler(program, num_stages, limit) for program, limit in zip(split, limits, strict=True)])


def _whole(program: Program) -> Program:
    """The program with its backwards in one action, where their first part is."""
    return tuple(
        action._replace(kind=Kind.BACKWARD) if action.kind is Kind.INPUT_GRADIENT else action
        for action in program
        if action.kind is not Kind.WEIGHT_GRADIENT
    )


def _split(program: Program, num_whole: int) -> Program:
    """The program with I in the place of the backwards of later micro-batches than the first ``num_whole``."""
    return tuple(result(action) if (action.microbatch or 0) >= num_whole else action for action in program)


class _Filler:
    """Does a program's actions in order, and weight gradients in between."""

    def __init__(self, program: Program, num_stages: int, limit: int):
        self._todo = deque(program)
        self._held = SplitBackward(num_stages, limit)

    def choose(self, done: Set[Action]) -> Action | None:
        if self._todo and self._held.can_start(self._todo[0], done):
            return self._held.take(self._todo)
        return self._held.take_weight_gradient()
