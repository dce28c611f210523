"""When a tensor that was sent can be let go without waiting for a rank that is not there yet."""

from collections import defaultdict, deque
from collections.abc import Mapping
from typing import TypeAlias

from hybridpp.schedule.action import Action, Kind, Program, Programs
from hybridpp.schedule.order import walk

SendsDone: TypeAlias = tuple[tuple[tuple[Action, ...], ...], ...]

# The receive that takes what was sent: (stages further, kind).
_TAKEN_BY = {
    Kind.SEND_ACTIVATION: (1, Kind.RECEIVE_ACTIVATION),
    Kind.SEND_GRADIENT: (-1, Kind.RECEIVE_GRADIENT),
}
# The send behind each receive.
_SENT_BY = {taken: (-further, sends) for sends, (further, taken) in _TAKEN_BY.items()}
# The receive that a compute action waits for, where there is one.
_WAITS_FOR = {
    Kind.FORWARD: Kind.RECEIVE_ACTIVATION,
    Kind.BACKWARD: Kind.RECEIVE_GRADIENT,
    Kind.INPUT_GRADIENT: Kind.RECEIVE_GRADIENT,
}


def sends_done(lowered: Programs, max_open: int = 8) -> SendsDone:
    """For every place of every rank's program, the sends whose receives are certainly posted by then.

    Before that action, waiting for these sends holds nobody up for ever: whatever was late, some message that this rank
    has already used left its sender after the receive was posted. Each send stands at the first such place; one whose
    receive may still be missing when its rank's program ends stands nowhere, and is waited for at the end.

    Where nothing comes back that could tell (in evaluation, say, all messages go one way), a rank that runs ahead waits
    for the oldest of more than ``max_open`` such sends to a peer, if every rank gets to its end that way.

    Args:
        lowered: programs from :func:`~hybridpp.schedule.lower`; not checked here.
        max_open: sends to a peer that may stay open.

    Returns:
        By rank and place in its program, the rank's own sends, oldest first on each channel.
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
    """The same, with each send that stands nowhere before the one that comes ``max_open`` later to that rank."""
    listed = {send for sends in done for send in sends}
    waits = [list(sends) for sends in done]
    left: defaultdict[int, deque[Action]] = defaultdict(deque)
    for place, action in enumerate(program):
        if action.kind in _TAKEN_BY and action not in listed:
            sends = left[rank_of[_receive_of(action).stage]]
            sends.append(action)
            if len(sends) > max_open:
                waits[place].append(sends.popleft())
    return tuple(map(tuple, waits))


def _all_end(lowered: Programs, done: SendsDone) -> bool:
    """Whether all ranks come to their end if each waits for the receives of these sends to be posted."""
    places = [0] * len(lowered)
    happened: set[Action] = set()

    def can_go(rank: int) -> bool:
        place = places[rank]
        if place == len(lowered[rank]):
            return False
        action = lowered[rank][place]
        needed = _WAITS_FOR.get(action.kind)
        message = needed and Action(action.stage, needed, action.microbatch)
        if message in happened and _sent_by(message) not in happened:
            return False
        return all(_receive_of(send) in happened for send in done[rank][place])

    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(lowered):
            while can_go(rank):
                happened.add(program[places[rank]])
                places[rank] += 1
                moved = True
    return all(place == len(program) for place, program in zip(places, lowered, strict=True))


def _sent_by(receive: Action) -> Action:
    further, kind = _SENT_BY[receive.kind]
    return Action(receive.stage + further, kind, receive.microbatch)


class _HappensBefore:
    """Vector clocks: how far each rank certainly is when another one is at a place of its program."""

    def __init__(self, lowered: Programs):
        self._lowered = lowered
        self._posted = {
            action: (rank, place)
            for rank, program in enumerate(lowered)
            for place, action in enumerate(program)
            if action.kind in (Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT)
        }
        # By rank: of each rank, how many actions are certainly done.
        self._clocks = [[0] * len(lowered) for _ in lowered]
        # By message: the sender's clock right after the send.
        self._stamps: dict[Action, list[int]] = {}
        # By rank and channel (peer, kind): sends that may not be taken yet, with the receive's place in the peer's
        # program. Only along a channel are receives posted in the order of the sends.
        self._open: list[defaultdict[tuple[int, Kind], deque[tuple[int, Action]]]] = [
            defaultdict(deque) for _ in lowered
        ]
        self._done: list[list[tuple[Action, ...]]] = [[] for _ in lowered]

    def run(self) -> SendsDone:
        for rank in range(len(self._lowered)):
            self._advance(rank)
        for rank, _ in walk(tuple(_computed(program) for program in self._lowered)):
            self._compute(rank)
            self._advance(rank)
        return tuple(map(tuple, self._done))

    def _advance(self, rank: int) -> None:
        """Do what stands before the rank's next compute action."""
        program = self._lowered[rank]
        while len(self._done[rank]) < len(program) and not program[len(self._done[rank])].kind.computes:
            action = program[len(self._done[rank])]
            self._pass(rank)
            if action.kind in _TAKEN_BY:
                receive = _receive_of(action)
                peer, place = self._posted[receive]
                self._stamps[receive] = list(self._clocks[rank])
                self._open[rank][peer, receive.kind].append((place, action))

    def _compute(self, rank: int) -> None:
        """Do the rank's next compute action: once its message is here, all that its sender had done is certain."""
        action = self._lowered[rank][len(self._done[rank])]
        self._pass(rank)
        kind = _WAITS_FOR.get(action.kind)
        stamp = self._stamps.get(Action(action.stage, kind, action.microbatch)) if kind else None
        if stamp:
            self._clocks[rank] = list(map(max, self._clocks[rank], stamp))

    def _pass(self, rank: int) -> None:
        """Go to the next place; note which sends are certainly taken at this one."""
        clock = self._clocks[rank]
        taken = []
        for (peer, _), sends in self._open[rank].items():
            while sends and sends[0][0] < clock[peer]:
                taken.append(sends.popleft()[1])
        self._done[rank].append(tuple(taken))
        clock[rank] += 1


def _computed(program: Program) -> Program:
    return tuple(action for action in program if action.kind.computes)
