"""When a rank gathers the weights of its stages, and frees them (ZeRO 3)."""

from collections.abc import Iterator, Sequence

from hybridpp.schedule.action import Action, ActionKind, Program

_USES_WEIGHTS = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)


def with_unshards(program: Program, max_stages: int) -> Program:
    """A rank's lowered program with UNSHARD and RESHARD: the weights of a stage are there where it uses them.

    A stage whose next use is last makes room (Belady, https://doi.org/10.1147/sj.52.0078), which is optimal because the
    order of uses is known. W uses no weights. UNSHARD is one compute action early, so that the gather runs during that;
    so the weights of one stage more than ``max_stages`` may be there for a while.

    Args:
        program: of the rank.
        max_stages: number of stages whose weights may be there, at least 1.
    """
    uses = [position for position, action in enumerate(program) if action.kind in _USES_WEIGHTS]
    before: dict[int, list[Action]] = {}
    after: dict[int, list[Action]] = {}
    last_use: dict[int, int] = {}
    there: set[int] = set()
    for turn, position in enumerate(uses):
        stage = program[position].stage
        if stage not in there:
            if len(there) == max_stages:
                evicted = max(there, key=lambda one: _next_use(program, uses[turn:], one))
                there.remove(evicted)
                after.setdefault(last_use[evicted], []).append(Action(evicted, ActionKind.RESHARD))
            there.add(stage)
            early = _previous_compute(program, position)
            before.setdefault(early, []).append(Action(stage, ActionKind.UNSHARD))
        last_use[stage] = position
    for stage in there:
        after.setdefault(last_use[stage], []).append(Action(stage, ActionKind.RESHARD))
    return tuple(_merged(program, before, after))


def _next_use(program: Program, uses: Sequence[int], stage: int) -> int:
    return next((position for position in uses if program[position].stage == stage), len(program))


def _previous_compute(program: Program, position: int) -> int:
    """The compute action before one, unless that is the first."""
    return next((index for index in reversed(range(position)) if program[index].kind.computes), position)


def _merged(program: Program, before: dict[int, list[Action]], after: dict[int, list[Action]]) -> Iterator[Action]:
    for position, action in enumerate(program):
        yield from before.get(position, ())
        yield action
        yield from after.get(position, ())
