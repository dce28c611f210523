"""When a sent tensor can be freed without waiting for a rank that has not reached its receive."""

from collections import defaultdict, deque
from collections.abc import Mapping
from typing import TypeAlias

from hybridpp.schedule.action import Action, ActionKind, Program, Programs
from hybridpp.schedule.dependencies import walk

CompletedSends: TypeAlias = tuple[tuple[tuple[Action, ...], ...], ...]

# The receive of each send: (difference of stages, kind).
_TAKEN_BY = {
    ActionKind.SEND_ACTIVATION: (1, ActionKind.RECEIVE_ACTIVATION),
    ActionKind.SEND_GRADIENT: (-1, ActionKind.RECEIVE_GRADIENT),
}
# The send of each receive.
_SENT_BY = {taken: (-further, sends) for sends, (further, taken) in _TAKEN_BY.items()}
# The receive that a compute action waits for, if any.
_WAITS_FOR = {
    ActionKind.FORWARD: ActionKind.RECEIVE_ACTIVATION,
    ActionKind.BACKWARD: ActionKind.RECEIVE_GRADIENT,
    ActionKind.INPUT_GRADIENT: ActionKind.RECEIVE_GRADIENT,
}


def completed_sends(lowered: Programs, max_open: int = 8) -> CompletedSends:
    """For every position of every rank's program, the sends whose receives are certainly posted by then.

    Waiting for these sends before that action cannot deadlock: some message that this rank has already used was sent
    after the receive was posted. Each send is listed at the first such position. A send whose receive may still be
    missing when its rank's program ends is not listed; it is waited for at the end.

    If no message comes back that could prove it (in evaluation all messages go one way), a rank that runs ahead waits
    for the oldest of more than ``max_open`` such sends to a peer, provided that no deadlock follows.

    Args:
        lowered: programs from :func:`~hybridpp.schedule.lower`; not checked here.
        max_open: number of sends to a peer that may stay open.

    Returns:
        By rank and position in its program, the rank's own sends, oldest first on each channel.
    """
    certain = _HappensBefore(lowered).run()
    rank_of = {action.stage: rank for rank, program in enumerate(lowered) for action in program}
    bounded = tuple(
        _wait_for_oldest(program, done, rank_of, max_open) for program, done in zip(lowered, certain, strict=True)
    )
    return bounded if bounded != certain and _all_end(lowered, bounded) else certain


def _receive_of(send: Action) -> Action:
    further, kind = _TAKEN_BY[send.kind]
    return Action(send.stage + further, kind, send.microbatch)


def _wait_for_oldest(
    program: Program, done: tuple[tuple[Action, ...], ...], rank_of: Mapping[int, int], max_open: int
) -> tuple[tuple[Action, ...], ...]:
    """The same, with each unlisted send added before the one that follows ``max_open`` sends later to the same rank."""
    listed = {send for sends in done for send in sends}
    waits = [list(sends) for sends in done]
    left: defaultdict[int, deque[Action]] = defaultdict(deque)
    for position, action in enumerate(program):
        if action.kind in _TAKEN_BY and action not in listed:
            sends = left[rank_of[_receive_of(action).stage]]
            sends.append(action)
            if len(sends) > max_open:
                waits[position].append(sends.popleft())
    return tuple(map(tuple, waits))


def _all_end(lowered: Programs, done: CompletedSends) -> bool:
    """Whether no deadlock follows if each rank waits for the receives of these sends to be posted."""
    positions = [0] * len(lowered)
    happened: set[Action] = set()

    def can_go(rank: int) -> bool:
        position = positions[rank]
        if position == len(lowered[rank]):
            return False
        action = lowered[rank][position]
        needed = _WAITS_FOR.get(action.kind)
        message = needed and Action(action.stage, needed, action.microbatch)
        if message in happened and _sent_by(message) not in happened:
            return False
        return all(_receive_of(send) in happened for send in done[rank][position])

    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(lowered):
            while can_go(rank):
                happened.add(program[positions[rank]])
                positions[rank] += 1
                moved = True
    return all(position == len(program) for position, program in zip(positions, lowered, strict=True))


def _sent_by(receive: Action) -> Action:
    further, kind = _SENT_BY[receive.kind]
    return Action(receive.stage + further, kind, receive.microbatch)


class _HappensBefore:
    """Vector clocks: how far each rank certainly is when another one is at a position of its program."""

    def __init__(self, lowered: Programs):
        self._lowered = lowered
        self._posted = {
            action: (rank, position)
            for rank, program in enumerate(lowered)
            for position, action in enumerate(program)
            if action.kind in (ActionKind.RECEIVE_ACTIVATION, ActionKind.RECEIVE_GRADIENT)
        }
        # By rank: how many actions of each rank are certainly done.
        self._clocks = [[0] * len(lowered) for _ in lowered]
        # By message: the sender's clock right after the send.
        self._stamps: dict[Action, list[int]] = {}
        # By rank and channel (peer, kind): sends that may not be received yet, with the receive's position in the
        # peer's program. Receives are posted in the order of the sends only within a channel.
        self._open: list[defaultdict[tuple[int, ActionKind], deque[tuple[int, Action]]]] = [
            defaultdict(deque) for _ in lowered
        ]
        self._done: list[list[tuple[Action, ...]]] = [[] for _ in lowered]

    def run(self) -> CompletedSends:
        for rank in range(len(self._lowered)):
            self._advance(rank)
        for rank, _ in walk(tuple(_computed(program) for program in self._lowered)):
            self._compute(rank)
            self._advance(rank)
        return tuple(map(tuple, self._done))

    def _advance(self, rank: int) -> None:
        """Advance to the rank's next compute action."""
        program = self._lowered[rank]
        while len(self._done[rank]) < len(program) and not program[len(self._done[rank])].kind.computes:
            action = program[len(self._done[rank])]
            self._pass(rank)
            if action.kind in _TAKEN_BY:
                receive = _receive_of(action)
                peer, position = self._posted[receive]
                self._stamps[receive] = list(self._clocks[rank])
                self._open[rank][peer, receive.kind].append((position, action))

    def _compute(self, rank: int) -> None:
        """Run the rank's next compute action: its message proves all that its sender had done before."""
        action = self._lowered[rank][len(self._done[rank])]
        self._pass(rank)
        kind = _WAITS_FOR.get(action.kind)
        stamp = self._stamps.get(Action(action.stage, kind, action.microbatch)) if kind else None
        if stamp:
            self._clocks[rank] = list(map(max, self._clocks[rank], stamp))

    def _pass(self, rank: int) -> None:
        """Go to the next position; record which sends are certainly received at this one."""
        clock = self._clocks[rank]
        taken = []
        for (peer, _), sends in self._open[rank].items():
            while sends and sends[0][0] < clock[peer]:
                taken.append(sends.popleft()[1])
        self._done[rank].append(tuple(taken))
        clock[rank] += 1


def _computed(program: Program) -> Program:
    return tuple(action for action in program if action.kind.computes)
