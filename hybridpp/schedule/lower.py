"""From what is computed to what is done: add the sends, the receives and the reduction of gradients."""

from collections import deque
from collections.abc import Iterator
from typing import TypeAlias

from hybridpp.schedule.action import Action, Kind, Program, Programs

_Channel: TypeAlias = tuple[int, int, Kind]
"""Rank that sends, rank that receives, and the kind of receive: messages on one channel arrive in order."""

# What takes a gradient from the next stage and has one for the previous stage.
_GOES_BACK = (Kind.BACKWARD, Kind.INPUT_GRADIENT)
# What adds to the gradients of a stage's parameters.
_FILLS_GRADIENTS = (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)


def lower(programs: Programs) -> Programs:
    """Programs with communication added.

    A result is sent right after it was computed; stages of one rank hand over without a message. Each stage's gradients
    are reduced after the last action that adds to them, B or W.

    A receive is posted one compute action ahead of its use, so that the transfer overlaps with that action. On each
    channel (from one rank to another, activations or gradients) receives are posted in the order of the sends: one that
    is needed before an earlier message of its channel has that one posted first. All schedules made here use messages
    in the order they are sent in, so at any time a rank has posted at most two receives that are not used up: for the
    action under way and for the next one, however many micro-batches there are.

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
                    # What nobody sends is received all the same: programs that cannot run are not mended here.
                    lowered.append(channel.popleft() if channel else receive)
                    posted.add(lowered[-1])
        if now is not None:
            lowered.append(now)
            lowered.extend(_sends(now, rank, rank_of))
            if last_gradient.get(now.stage) == now:
                lowered.append(Action(now.stage, Kind.REDUCE_GRADIENTS))
    return tuple(lowered)


def _arrives_as(action: Action) -> Iterator[Action]:
    """The receive that takes the action's result, were the stage it goes to on another rank."""
    if action.kind is Kind.FORWARD:
        yield Action(action.stage + 1, Kind.RECEIVE_ACTIVATION, action.microbatch)
    elif action.kind in _GOES_BACK:
        yield Action(action.stage - 1, Kind.RECEIVE_GRADIENT, action.microbatch)


def _receives(action: Action, rank: int, rank_of: dict[int, int]) -> Iterator[tuple[Action, int]]:
    """What an action must receive, and the rank it comes from."""
    if action.kind is Kind.FORWARD and rank_of.get(action.stage - 1, rank) != rank:
        yield action._replace(kind=Kind.RECEIVE_ACTIVATION), rank_of[action.stage - 1]
    if action.kind in _GOES_BACK and rank_of.get(action.stage + 1, rank) != rank:
        yield action._replace(kind=Kind.RECEIVE_GRADIENT), rank_of[action.stage + 1]


def _sends(action: Action, rank: int, rank_of: dict[int, int]) -> Iterator[Action]:
    if action.kind is Kind.FORWARD and rank_of.get(action.stage + 1, rank) != rank:
        yield action._replace(kind=Kind.SEND_ACTIVATION)
    if action.kind in _GOES_BACK and rank_of.get(action.stage - 1, rank) != rank:
        yield action._replace(kind=Kind.SEND_GRADIENT)
