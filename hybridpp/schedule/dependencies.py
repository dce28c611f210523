"""Dependencies between actions."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from hybridpp.schedule.action import Action, ActionKind, Programs

UNIT_DURATIONS: Mapping[ActionKind, float] = {
    ActionKind.FORWARD: 1,
    ActionKind.BACKWARD: 2,
    ActionKind.INPUT_GRADIENT: 1,
    ActionKind.WEIGHT_GRADIENT: 1,
}
"""Durations of compute actions, in forwards: a backward pass has twice the floating-point operations."""


def result(action: Action) -> Action:
    """The action that stands for the result: B produces the same gradient as I."""
    return (
        Action(action.stage, ActionKind.INPUT_GRADIENT, action.microbatch)
        if action.kind is ActionKind.BACKWARD
        else action
    )


def needs(action: Action, num_stages: int) -> tuple[Action, ...]:
    """The results (see :func:`result`) that a compute action needs before it starts."""
    stage, kind, microbatch = action
    if kind is ActionKind.FORWARD:
        return (Action(stage - 1, kind, microbatch),) if stage else ()
    if kind is ActionKind.WEIGHT_GRADIENT:
        return (Action(stage, ActionKind.INPUT_GRADIENT, microbatch),)
    forward = Action(stage, ActionKind.FORWARD, microbatch)
    if stage == num_stages - 1:
        return (forward,)
    return (forward, Action(stage + 1, ActionKind.INPUT_GRADIENT, microbatch))


def count_stages(programs: Programs) -> int:
    """One more than the highest stage; 0 for empty programs."""
    return 1 + max((action.stage for program in programs for action in program), default=-1)


def walk(programs: Programs) -> Iterator[tuple[int, int]]:
    """Every action of compute programs, as (rank, position), each after those it needs.

    If the programs deadlock, it ends early: actions that never run are not yielded.
    """
    num_stages = count_stages(programs)
    done: set[Action] = set()
    waiting: dict[Action, list[int]] = {}
    position = [0] * len(programs)
    ready = list(range(len(programs)))
    while ready:
        rank = ready.pop()
        program = programs[rank]
        while position[rank] < len(program):
            action = program[position[rank]]
            missing = next((need for need in needs(action, num_stages) if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            yield rank, position[rank]
            position[rank] += 1
            done.add(result(action))
            ready += waiting.pop(result(action), ())


class StartEnd(NamedTuple):
    """When an action runs, in the unit of the durations."""

    start: float
    end: float


def earliest_times(
    programs: Programs, durations: Mapping[ActionKind, float] = UNIT_DURATIONS
) -> dict[Action, StartEnd]:
    """When each action of compute programs runs if all start as early as possible and messages take no time.

    Actions that never run, because the programs deadlock, are left out.

    Args:
        programs: what each rank computes.
        durations: of actions by their kind, above 0.
    """
    num_stages = count_stages(programs)
    intervals: dict[Action, StartEnd] = {}
    ends: dict[Action, float] = {}
    free = [0.0] * len(programs)
    for rank, position in walk(programs):
        action = programs[rank][position]
        start = max([free[rank], *(ends[need] for need in needs(action, num_stages))])
        free[rank] = ends[result(action)] = start + durations[action.kind]
        intervals[action] = StartEnd(start, free[rank])
    return intervals
