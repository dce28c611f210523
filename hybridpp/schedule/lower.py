"""From what is computed to what is done: add the sends, the receives and the reduction of gradients."""

from collections.abc import Iterable

from hybridpp.schedule.action import Action, Kind, Program, Programs

# What takes a gradient from the stage behind and has one for the stage before.
_GOES_BACK = (Kind.BACKWARD, Kind.INPUT_GRADIENT)
# What adds to the gradients of a stage's parameters.
_FILLS_GRADIENTS = (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)


def lower(programs: Programs) -> Programs:
    """Programs with communication added.

    A result is sent right after it was computed. A receive is posted one compute action ahead of its use, so that the
    transfer overlaps with that action and a rank holds at most one input that it does not use yet. Each stage's
    gradients are reduced after the last action that adds to them, B or W.
    """
    rank_of = {action.stage: rank for rank, program in enumerate(programs) for action in program}
    return tuple(_lower_rank(rank, program, rank_of) for rank, program in enumerate(programs))


def _lower_rank(rank: int, program: Program, rank_of: dict[int, int]) -> Program:
    last_gradient = {action.stage: action for action in program if action.kind in _FILLS_GRADIENTS}
    lowered: list[Action] = []
    for now, following in zip((None, *program), (*program, None), strict=True):
        # `following` is received for before `now` is computed: one action ahead.
        if following is not None:
            lowered.extend(_receives(following, rank, rank_of))
        if now is not None:
            lowered.append(now)
            lowered.extend(_sends(now, rank, rank_of))
            if last_gradient.get(now.stage) == now:
                lowered.append(Action(now.stage, Kind.REDUCE_GRADIENTS))
    return tuple(lowered)


def _receives(action: Action, rank: int, rank_of: dict[int, int]) -> Iterable[Action]:
    if action.kind is Kind.FORWARD and rank_of.get(action.stage - 1, rank) != rank:
        yield action._replace(kind=Kind.RECEIVE_ACTIVATION)
    if action.kind in _GOES_BACK and rank_of.get(action.stage + 1, rank) != rank:
        yield action._replace(kind=Kind.RECEIVE_GRADIENT)


def _sends(action: Action, rank: int, rank_of: dict[int, int]) -> Iterable[Action]:
    if action.kind is Kind.FORWARD and rank_of.get(action.stage + 1, rank) != rank:
        yield action._replace(kind=Kind.SEND_ACTIVATION)
    if action.kind in _GOES_BACK and rank_of.get(action.stage - 1, rank) != rank:
        yield action._replace(kind=Kind.SEND_GRADIENT)
