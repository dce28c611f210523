"""Lowering: add sends, receives and the reduction of gradients to compute programs."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from hybridpp.schedule.action import Action, ActionKind, Program, Programs
from hybridpp.schedule.dependencies import UNIT_DURATIONS, StartEnd, earliest_times

# The send and the receive of an action's result, and by how much the receiving stage is higher.
_MESSAGES = {
    ActionKind.FORWARD: (ActionKind.SEND_ACTIVATION, ActionKind.RECEIVE_ACTIVATION, 1),
    ActionKind.BACKWARD: (ActionKind.SEND_GRADIENT, ActionKind.RECEIVE_GRADIENT, -1),
    ActionKind.INPUT_GRADIENT: (ActionKind.SEND_GRADIENT, ActionKind.RECEIVE_GRADIENT, -1),
}
FILLS_GRADIENTS = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)
"""Actions that add to the gradients of a stage's parameters."""


class _Post(NamedTuple):
    """A communication to start.

    Attributes:
        time: end of the action that it carries the result of. With that action's rank and position, it is the same for
            a send and its receive, so all ranks agree on one order of all messages.
        rank: of that action.
        position: of that action in the rank's program.
        action: the send, receive or reduction.
    """

    time: float
    rank: int
    position: int
    action: Action


def lower(
    programs: Programs, durations: Mapping[ActionKind, float] = UNIT_DURATIONS, *, reduces_each: bool = False
) -> Programs:
    """Programs with communication added, in the order of one global clock.

    The clock is that of the compute programs, each action as early as possible. A message has the time at which its
    sender has computed it. Before each compute action a rank starts exactly the sends and receives whose time has come,
    in the order of their times; equal times are ordered by the sender's rank and program. So whatever waits, waits for
    something that is earlier in one order on all ranks. Such programs cannot deadlock, even if sends wait for their
    receives, if all messages of a rank go through one queue, or if a device drains before it goes on
    (:func:`~hybridpp.schedule.find_deadlock`).

    Stages on the same rank pass results without a message. Each stage's gradients are reduced after the last action
    that adds to them, B or W.

    Args:
        programs: compute programs that :func:`~hybridpp.schedule.check_program` accepts.
        durations: of actions by their kind, above 0. They decide how early receives are posted.
        reduces_each: whether gradients are reduced after every action that adds to them, not only after the last; the
            reductions have the action's micro-batch then.
    """
    intervals = earliest_times(programs, durations)
    rank_of = {action.stage: rank for rank, program in enumerate(programs) for action in program}
    posts: list[list[_Post]] = [[] for _ in programs]
    for rank, program in enumerate(programs):
        last_gradient = {action.stage: action for action in program if action.kind in FILLS_GRADIENTS}
        for position, action in enumerate(program):
            when = (intervals[action].end, rank, position)
            for peer, post in _messages(action, rank, rank_of):
                posts[peer].append(_Post(*when, post))
            if reduces_each and action.kind in FILLS_GRADIENTS:
                posts[rank].append(_Post(*when, action._replace(kind=ActionKind.REDUCE_GRADIENTS)))
            elif last_gradient.get(action.stage) == action:
                posts[rank].append(_Post(*when, Action(action.stage, ActionKind.REDUCE_GRADIENTS)))
    # Not by the action: of one result, the send comes before the reduction.
    ordered = [sorted(own, key=lambda post: post[:3]) for own in posts]
    return tuple(_merged(program, deque(own), intervals) for program, own in zip(programs, ordered, strict=True))


def first_microbatches(programs: Programs, count: int, *, gathers: bool = False) -> Programs:
    """Lowered programs without the work for all micro-batches but the first ``count``.

    What belongs to no micro-batch stays, and so do reductions. Replicas with fewer micro-batches than others run them,
    so that all replicas reduce in one order.

    Args:
        programs: of all ranks.
        count: of micro-batches.
        gathers: whether passes gather weights by themselves: then an UNSHARD with its micro-batch is in the place of
            each forward that is left out, and of each B or I.
    """

    def kept(program: Program) -> Iterator[Action]:
        for action in program:
            if (action.microbatch or 0) < count or action.kind is ActionKind.REDUCE_GRADIENTS:
                yield action
            elif gathers and action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT):
                yield action._replace(kind=ActionKind.UNSHARD)

    return tuple(tuple(kept(program)) for program in programs)


def _merged(program: Program, posts: deque[_Post], intervals: Mapping[Action, StartEnd]) -> Program:
    """A rank's program, each action after the posts whose time has come when it starts."""
    lowered: list[Action] = []
    for action in program:
        while posts and posts[0].time <= intervals[action].start:
            lowered.append(posts.popleft().action)
        lowered.append(action)
    return (*lowered, *(post.action for post in posts))


def _messages(action: Action, rank: int, rank_of: Mapping[int, int]) -> Iterator[tuple[int, Action]]:
    """The send and the receive of an action's result, each with its rank; none if the consumer is on the same rank."""
    send, receive, further = _MESSAGES.get(action.kind, (None, None, 0))
    peer = rank_of.get(action.stage + further, rank)
    if send is not None and receive is not None and peer != rank:
        yield rank, action._replace(kind=send)
        yield peer, Action(action.stage + further, receive, action.microbatch)
