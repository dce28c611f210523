"""Lowering: add sends, receives and the reduction of gradients to compute programs."""

from collections import deque
from collections.abc import Iterator
from typing import TypeAlias

from hybridpp.schedule.action import Action, ActionKind, Program, Programs

_Channel: TypeAlias = tuple[int, int, ActionKind]
"""The sending rank, the receiving rank, and the kind of receive. Messages on one channel arrive in order."""

# Actions that take a gradient from the next stage and produce one for the previous stage.
_GOES_BACK = (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)
# Actions that add to the gradients of a stage's parameters.
_FILLS_GRADIENTS = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)


def lower(programs: Programs) -> Programs:
    """Programs with communication added.

    A result is sent right after it is computed; stages on the same rank pass it without a message. Each stage's
    gradients are reduced after the last action that adds to them, B or W.

    A receive is posted one compute action ahead of its use, so that the transfer overlaps with that action. On each
    channel (from one rank to another, activations or gradients) receives are posted in the order of the sends: if a
    message is needed before an earlier one of its channel, the earlier one is posted first. All schedules in this
    package use messages in the order of the sends, so a rank has at most two posted receives that are not yet used, for
    the current action and for the next one, whatever the number of micro-batches.

    Args:
        programs: compute programs that :func:`~hybridpp.schedule.check_program` accepts.
    """
    rank_of = {action.stage: rank for rank, program in enumerate(programs) for action in program}
    channels: dict[_Channel, deque[Action]] = {}
    for rank, program in enumerate(programs):
        for action in program:
            for receive in _arrives_as(action):
                peer = rank_of.get(receive.stage, rank)
                if peer != rank:
                    channels.setdefault((rank, peer, receive.kind), deque()).append(receive)
    return tuple(_lower_rank(rank, program, rank_of, channels) for rank, program in enumerate(programs))


def _lower_rank(
    rank: int, program: Program, rank_of: dict[int, int], channels: dict[_Channel, deque[Action]]
) -> Program:
    last_gradient = {action.stage: action for action in program if action.kind in _FILLS_GRADIENTS}
    lowered: list[Action] = []
    posted: set[Action] = set()
    for now, following in zip((None, *program), (*program, None), strict=True):
        # `following` is received for before `now` is computed: one action ahead.
        if following is not None:
            for receive, source in _receives(following, rank, rank_of):
                channel = channels.get((source, rank, receive.kind))
                while receive not in posted:
                    # A receive without a send is added as well: invalid programs are not corrected here.
                    lowered.append(channel.popleft() if channel else receive)
                    posted.add(lowered[-1])
        if now is not None:
            lowered.append(now)
            lowered.extend(_sends(now, rank, rank_of))
            if last_gradient.get(now.stage) == now:
                lowered.append(Action(now.stage, ActionKind.REDUCE_GRADIENTS))
    return tuple(lowered)


def _arrives_as(action: Action) -> Iterator[Action]:
    """The receive for the action's result, if its consumer were on another rank."""
    if action.kind is ActionKind.FORWARD:
        yield Action(action.stage + 1, ActionKind.RECEIVE_ACTIVATION, action.microbatch)
    elif action.kind in _GOES_BACK:
        yield Action(action.stage - 1, ActionKind.RECEIVE_GRADIENT, action.microbatch)


def _receives(action: Action, rank: int, rank_of: dict[int, int]) -> Iterator[tuple[Action, int]]:
    """The receives that an action needs, each with the sending rank."""
    if action.kind is ActionKind.FORWARD and rank_of.get(action.stage - 1, rank) != rank:
        yield action._replace(kind=ActionKind.RECEIVE_ACTIVATION), rank_of[action.stage - 1]
    if action.kind in _GOES_BACK and rank_of.get(action.stage + 1, rank) != rank:
        yield action._replace(kind=ActionKind.RECEIVE_GRADIENT), rank_of[action.stage + 1]


def _sends(action: Action, rank: int, rank_of: dict[int, int]) -> Iterator[Action]:
    if action.kind is ActionKind.FORWARD and rank_of.get(action.stage + 1, rank) != rank:
        yield action._replace(kind=ActionKind.SEND_ACTIVATION)
    if action.kind in _GOES_BACK and rank_of.get(action.stage - 1, rank) != rank:
        yield action._replace(kind=ActionKind.SEND_GRADIENT)
