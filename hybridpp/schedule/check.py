"""Check, without running it, that a schedule is complete and free of deadlocks."""

from typing import TypeAlias

from hybridpp.errors import ScheduleError
from hybridpp.schedule.action import Action, ActionKind, Programs
from hybridpp.schedule.dependencies import count_stages, needs, result, walk

_Positions: TypeAlias = dict[Action, tuple[int, int]]
"""Rank and position of every action."""


def check_program(programs: Programs, num_stages: int | None = None, num_microbatches: int | None = None) -> None:
    """Accept exactly the compute programs (before lowering) that terminate and run every action once.

    Each stage is on one rank. Each micro-batch has one forward per stage and, if the programs train, one backward: B,
    or I and later W. Any order without a deadlock is valid. Messages need no common order, since
    :func:`~hybridpp.schedule.lower` posts receives in the order of the sends.

    Args:
        programs: what each rank computes.
        num_stages: stages of the pipeline; None: derived from the programs.
        num_microbatches: micro-batches per batch; None: derived from the programs.

    Raises:
        ScheduleError: the programs are invalid; the message names the first bad action and how to correct it.
    """
    cells = [action for program in programs for action in program]
    if not cells:
        raise ScheduleError(
            "a schedule needs at least one action: got none. Give each rank the forwards of its stages."
        )
    stages = count_stages(programs) if num_stages is None else num_stages
    microbatches = num_microbatches
    if microbatches is None:
        microbatches = 1 + max(action.microbatch or 0 for action in cells)
    where = _check_cells(programs, stages, microbatches)
    _check_complete(where, stages, microbatches)
    _check_own_order(programs, where, stages)
    _check_deadlock(programs, where, stages)


def _at(where: _Positions, action: Action) -> str:
    rank, position = where[action]
    return f"rank {rank}, position {position}"


def _check_cells(programs: Programs, num_stages: int, num_microbatches: int) -> _Positions:
    """Check each action: a compute action within the sizes, present once, on its stage's rank."""
    where: _Positions = {}
    rank_of: dict[int, int] = {}
    for rank, program in enumerate(programs):
        for position, action in enumerate(program):
            stage, kind, microbatch = action
            here = f"rank {rank}, position {position}"
            inside = microbatch is not None and 0 <= stage < num_stages and 0 <= microbatch < num_microbatches
            if not inside or not kind.computes:
                raise ScheduleError(
                    f"{action} ({here}) is not a compute action of {num_stages} stages and {num_microbatches} "
                    "micro-batches. Remove it."
                )
            if rank_of.setdefault(stage, rank) != rank:
                raise ScheduleError(
                    f"{action} ({here}) puts stage {stage} on a second rank. Move it to rank {rank_of[stage]}, which "
                    "already has the stage."
                )
            if action in where:
                raise ScheduleError(
                    f"{action} ({here}) is a duplicate of the one at {_at(where, action)}. Keep one of them."
                )
            where[action] = rank, position
    return where


def _check_complete(where: _Positions, num_stages: int, num_microbatches: int) -> None:
    """Check for one forward each, and either no backward at all or one for every forward."""
    trains = any(action.kind is not ActionKind.FORWARD for action in where)
    rank_of = {action.stage: rank for action, (rank, _) in where.items()}
    for stage in range(num_stages):
        if stage not in rank_of:
            raise ScheduleError(f"stage {stage} of {num_stages} is on no rank. Add its actions to one rank.")
        for microbatch in range(num_microbatches):
            if Action(stage, ActionKind.FORWARD, microbatch) not in where:
                raise ScheduleError(
                    f"{Action(stage, ActionKind.FORWARD, microbatch)} is missing. Add it to rank {rank_of[stage]}."
                )
            if trains:
                _check_backward(where, stage, microbatch, rank_of[stage])


def _check_backward(where: _Positions, stage: int, microbatch: int, rank: int) -> None:
    unsplit, first, second = (
        Action(stage, kind, microbatch)
        for kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
    )
    if unsplit in where:
        for part in (first, second):
            if part in where:
                raise ScheduleError(
                    f"{part} ({_at(where, part)}) is part of {unsplit} ({_at(where, unsplit)}). Keep {unsplit}, or "
                    f"both {first} and {second}."
                )
    elif first in where and second not in where:
        raise ScheduleError(
            f"{first} ({_at(where, first)}) has no {second}. Add {second} after it, or replace it by {unsplit}."
        )
    elif second in where and first not in where:
        raise ScheduleError(
            f"{second} ({_at(where, second)}) has no {first}. Add {first} before it, or replace it by {unsplit}."
        )
    elif first not in where:
        raise ScheduleError(f"{unsplit} is missing. Add it to rank {rank}, or both {first} and {second}.")


def _producer(need: Action, where: _Positions) -> Action:
    """The action whose result is needed: a gradient comes from I or from B."""
    return need if need in where else need._replace(kind=ActionKind.BACKWARD)


def _check_own_order(programs: Programs, where: _Positions, num_stages: int) -> None:
    """Check that what an action needs from its own rank precedes it."""
    for rank, program in enumerate(programs):
        for position, action in enumerate(program):
            for need in needs(action, num_stages):
                source = _producer(need, where)
                if where[source][0] == rank and where[source][1] > position:
                    raise ScheduleError(
                        f"{action} ({_at(where, action)}) comes before {source} ({_at(where, source)}), whose result "
                        f"it needs. Move it after {source}."
                    )


def _check_deadlock(programs: Programs, where: _Positions, num_stages: int) -> None:
    """Check that no ranks wait for each other in a cycle."""
    position = [0] * len(programs)
    done: set[Action] = set()
    for rank, ran in walk(programs):
        position[rank] = ran + 1
        done.add(result(programs[rank][ran]))
    stuck = next((rank for rank, program in enumerate(programs) if position[rank] < len(program)), None)
    if stuck is None:
        return
    # Follow each action that cannot start to the rank it waits for, until a rank occurs twice.
    circle: dict[int, tuple[Action, Action]] = {}
    while stuck not in circle:
        action = programs[stuck][position[stuck]]
        source = _producer(next(need for need in needs(action, num_stages) if need not in done), where)
        circle[stuck] = action, source
        stuck = where[source][0]
    links = list(circle.values())[list(circle).index(stuck) :]
    waits = ", ".join(
        f"{action} ({_at(where, action)}) for {source} ({_at(where, source)})" for action, source in links
    )
    moves = ", or ".join(f"{source} before {circle[where[source][0]][0]}" for _, source in links)
    raise ScheduleError(f"these actions deadlock; each waits for the next: {waits}. Move {moves}.")
