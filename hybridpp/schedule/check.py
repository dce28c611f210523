"""Whether a schedule runs to its end, found out without running it."""

from typing import TypeAlias

from hybridpp.errors import ScheduleError
from hybridpp.schedule.action import Action, Kind, Programs
from hybridpp.schedule.order import count_stages, needs, result, walk

_Where: TypeAlias = dict[Action, tuple[int, int]]
"""Rank and place of every action."""


def check_program(programs: Programs, num_stages: int | None = None, num_microbatches: int | None = None) -> None:
    """Accept exactly those compute programs (before lowering) that run to their end and do everything once.

    Each stage is on one rank. Each micro-batch goes forward through each stage once and, if the programs train at all,
    back once: in one action, B, or in two, I and later W. The order is free as long as no rank waits for ever; messages
    need no common order, since :func:`~hybridpp.schedule.lower` receives in the order in which it sends.

    Args:
        programs: what each rank computes.
        num_stages: stages of the pipeline; None for as many as the programs name.
        num_microbatches: micro-batches per batch; None for as many as the programs name.

    Raises:
        ScheduleError: the programs are no good; the message names the first bad cell and the way out.
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


def _at(where: _Where, action: Action) -> str:
    rank, place = where[action]
    return f"rank {rank}, place {place}"


def _check_cells(programs: Programs, num_stages: int, num_microbatches: int) -> _Where:
    """Every cell by itself: a compute action inside the range, once, on its stage's rank."""
    where: _Where = {}
    rank_of: dict[int, int] = {}
    for rank, program in enumerate(programs):
        for place, action in enumerate(program):
            stage, kind, microbatch = action
            here = f"rank {rank}, place {place}"
            inside = microbatch is not None and 0 <= stage < num_stages and 0 <= microbatch < num_microbatches
            if not inside or not kind.computes:
                raise ScheduleError(
                    f"{action} ({here}) is no compute action of {num_stages} stages and "
                    f"{num_microbatches} micro-batches. Take it out."
                )
            if rank_of.setdefault(stage, rank) != rank:
                raise ScheduleError(
                    f"{action} ({here}) puts stage {stage} on a second rank. Move it to rank "
                    f"{rank_of[stage]}, which has the stage already."
                )
            if action in where:
                raise ScheduleError(f"{action} ({here}) stands at {_at(where, action)} already. Keep one of them.")
            where[action] = rank, place
    return where


def _check_complete(where: _Where, num_stages: int, num_microbatches: int) -> None:
    """One forward, and no backward anywhere or one for every forward."""
    trains = any(action.kind is not Kind.FORWARD for action in where)
    rank_of = {action.stage: rank for action, (rank, _) in where.items()}
    for stage in range(num_stages):
        if stage not in rank_of:
            raise ScheduleError(f"stage {stage} of {num_stages} is on no rank. Give one rank its actions.")
        for microbatch in range(num_microbatches):
            if Action(stage, Kind.FORWARD, microbatch) not in where:
                raise ScheduleError(
                    f"{Action(stage, Kind.FORWARD, microbatch)} is missing. Add it to rank {rank_of[stage]}."
                )
            if trains:
                _check_backward(where, stage, microbatch, rank_of[stage])


def _check_backward(where: _Where, stage: int, microbatch: int, rank: int) -> None:
    whole, first, second = (
        Action(stage, kind, microbatch) for kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
    )
    if whole in where:
        for part in (first, second):
            if part in where:
                raise ScheduleError(
                    f"{part} ({_at(where, part)}) is part of {whole} ({_at(where, whole)}). Keep {whole}, or both "
                    f"{first} and {second}."
                )
    elif first in where and second not in where:
        raise ScheduleError(
            f"{first} ({_at(where, first)}) has no {second}. Add {second} behind it, or make it {whole}."
        )
    elif second in where and first not in where:
        raise ScheduleError(
            f"{second} ({_at(where, second)}) has no {first}. Add {first} before it, or make it {whole}."
        )
    elif first not in where:
        raise ScheduleError(f"{whole} is missing. Add it to rank {rank}, or both {first} and {second}.")


def _producer(need: Action, where: _Where) -> Action:
    """The action whose result is needed: a gradient comes from I or from B."""
    return need if need in where else need._replace(kind=Kind.BACKWARD)


def _check_own_order(programs: Programs, where: _Where, num_stages: int) -> None:
    """What an action needs from its own rank stands before it."""
    for rank, program in enumerate(programs):
        for place, action in enumerate(program):
            for need in needs(action, num_stages):
                source = _producer(need, where)
                if where[source][0] == rank and where[source][1] > place:
                    raise ScheduleError(
                        f"{action} ({_at(where, action)}) stands before {source} ({_at(where, source)}), whose result "
                        f"it needs. Move it behind {source}."
                    )


def _check_deadlock(programs: Programs, where: _Where, num_stages: int) -> None:
    """No ranks wait for each other in a circle."""
    place = [0] * len(programs)
    done: set[Action] = set()
    for rank, ran in walk(programs):
        place[rank] = ran + 1
        done.add(result(programs[rank][ran]))
    stuck = next((rank for rank, program in enumerate(programs) if place[rank] < len(program)), None)
    if stuck is None:
        return
    # Go from each action that cannot start to the rank that has what it needs, until a rank comes again.
    circle: dict[int, tuple[Action, Action]] = {}
    while stuck not in circle:
        action = programs[stuck][place[stuck]]
        source = _producer(next(need for need in needs(action, num_stages) if need not in done), where)
        circle[stuck] = action, source
        stuck = where[source][0]
    links = list(circle.values())[list(circle).index(stuck) :]
    waits = ", ".join(
        f"{action} ({_at(where, action)}) for {source} ({_at(where, source)})" for action, source in links
    )
    moves = ", or ".join(f"{source} before {circle[where[source][0]][0]}" for _, source in links)
    raise ScheduleError(f"these wait for each other for ever: {waits}. Move {moves}.")
