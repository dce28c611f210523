"""How many activations a schedule holds at once."""

from hybridpp.schedule.action import ActionKind, Program, Programs

_HOLDS = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1, ActionKind.WEIGHT_GRADIENT: -1}


def peak_activations(programs: Programs) -> tuple[int, ...]:
    """The largest number of activations that each rank holds at once.

    Counted in micro-batches of one stage, from the forward to the end of the backward: B, or W where it is split. A
    rank with several stages holds smaller ones, so compare schedules by the count over the number of stages per rank.
    """
    return tuple(_peak(program) for program in programs)


def _peak(program: Program) -> int:
    held = peak = 0
    for action in program:
        held += _HOLDS.get(action.kind, 0)
        peak = max(peak, held)
    return peak
