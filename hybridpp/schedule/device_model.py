"""Whether lowered programs can deadlock on a device whose queues, kernels and communicators wait for one another.

A check of the programs in the order of their hosts does not find this: a host continues after it has issued a message,
and the message waits on the device, where a send also waits for its receive.
"""

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from hybridpp.errors import ScheduleError
from hybridpp.schedule.action import Action, ActionKind, Program, Programs
from hybridpp.schedule.lower import lower
from hybridpp.schedule.send_lifetimes import completed_sends
from hybridpp.schedule.stage_placement import placement

# What the other end of a message is called: (kind, difference of stages).
_OTHER_END = {
    ActionKind.SEND_ACTIVATION: (ActionKind.RECEIVE_ACTIVATION, 1),
    ActionKind.SEND_GRADIENT: (ActionKind.RECEIVE_GRADIENT, -1),
    ActionKind.RECEIVE_ACTIVATION: (ActionKind.SEND_ACTIVATION, -1),
    ActionKind.RECEIVE_GRADIENT: (ActionKind.SEND_GRADIENT, 1),
}
_SENDS = (ActionKind.SEND_ACTIVATION, ActionKind.SEND_GRADIENT)
_READS = {
    ActionKind.FORWARD: ActionKind.RECEIVE_ACTIVATION,
    ActionKind.BACKWARD: ActionKind.RECEIVE_GRADIENT,
    ActionKind.INPUT_GRADIENT: ActionKind.RECEIVE_GRADIENT,
}
_ACTIVATIONS = (ActionKind.SEND_ACTIVATION, ActionKind.RECEIVE_ACTIVATION)


class Streams(Enum):
    """Which messages of a rank are in one queue of its device."""

    PAIR = "one per pair of ranks and group"
    GROUP = "one per group"
    RANK = "one for all messages"
    COMPUTE = "one for messages and compute"


class Drains(Enum):
    """When a host waits until its device has finished all that was issued."""

    NEVER = "never"
    FIRST_KERNEL = "before the first compute action of each kind: kernels are loaded then"
    COMMUNICATOR = "before it makes a communicator"
    ALWAYS = "before every compute action, and before it makes a communicator"


@dataclass(frozen=True)
class DeviceModel:
    """What waits for what on the devices of a pipeline, besides the data; the default is the least.

    Attributes:
        streams: which messages are in one queue.
        one_group: one group carries all messages, as here; False: one for each of activations and gradients and, where
            stages on one rank make it necessary, each direction.
        lazy_communicators: a host that uses a pair of ranks in a group for the first time waits until its peer does.
        drains: when a host waits for its device.
        in_order: a device starts everything in the order in which it was issued.
        waits_for_sends: the compute queue waits for the sends of :func:`~hybridpp.schedule.completed_sends`.
    """

    streams: Streams = Streams.PAIR
    one_group: bool = False
    lazy_communicators: bool = False
    drains: Drains = Drains.NEVER
    in_order: bool = False
    waits_for_sends: bool = True


STRICTEST = tuple(
    DeviceModel(Streams.COMPUTE, one_group, lazy_communicators=True, drains=Drains.ALWAYS, in_order=True)
    for one_group in (False, True)
)
"""Every wait of any model is a wait in these, too: programs that cannot deadlock here cannot in any model."""


def check_on_devices(programs: Programs) -> None:
    """Check that compute programs, lowered, cannot deadlock in the :data:`STRICTEST` models.

    Raises:
        ScheduleError: they can. :func:`~hybridpp.schedule.lower` excludes it for programs that
            :func:`~hybridpp.schedule.check_program` accepts.
    """
    lowered = lower(programs)
    for model in STRICTEST:
        stuck = find_deadlock(lowered, model)
        if stuck is not None:
            raise ScheduleError(
                f"this schedule can deadlock on a device that runs messages and kernels in one queue: {stuck}. Use a "
                "schedule of the list that `hybridpp schedule --compare` prints, and report this one."
            )


def find_deadlock(lowered: Programs, model: DeviceModel) -> str | None:
    """The action at which each rank's host waits when no rank can continue; None: all programs end.

    Both ends of a message are done when both have started. The model has no time: its result does not depend on
    how long anything takes.

    Args:
        lowered: from :func:`~hybridpp.schedule.lower`.
        model: of the devices and their communicators.
    """
    stuck = _Machine(lowered, model).run()
    return "; ".join(f"rank {rank} at {position}" for rank, position in stuck.items()) or None


class _Item(NamedTuple):
    """What a host has issued to its device.

    Attributes:
        action: compute or communication.
        is_wait: the queue only waits until the message has come, or has gone.
        after: number of items of the compute queue that must have finished before this one starts.
        number: in the order of issue.
    """

    action: Action
    is_wait: bool
    after: int
    number: int


class _Machine:
    """All ranks. No event is ever undone, so the order in which ranks are advanced does not matter."""

    def __init__(self, lowered: Programs, model: DeviceModel):
        self.model = model
        self.started: set[Action] = set()
        self.users: set[tuple[int, Hashable]] = set()
        self._where = placement(lowered)
        self._one_way = list(self._where) == sorted(self._where)
        done = completed_sends(lowered)
        self._ranks = [_Rank(self, rank, program, done[rank]) for rank, program in enumerate(lowered)]

    def run(self) -> dict[int, str]:
        """The action at which each rank waits that does not end."""
        while any(rank.advance() for rank in self._ranks):
            pass
        return {number: rank.position() for number, rank in enumerate(self._ranks) if not rank.ended()}

    def other_end(self, message: Action) -> Action:
        kind, further = _OTHER_END[message.kind]
        return Action(message.stage + further, kind, message.microbatch)

    def peer(self, message: Action) -> int:
        return self._where[self.other_end(message).stage]

    def group(self, message: Action, rank: int) -> Hashable:
        if self.model.one_group:
            return "all"
        ascending = (rank < self.peer(message)) == (message.kind in _SENDS)
        return message.kind in _ACTIVATIONS, ascending or self._one_way

    def has_passed(self, message: Action) -> bool:
        """Whether both ends of a message have started."""
        return message in self.started and self.other_end(message) in self.started


class _Rank:
    """The host and the device of one rank."""

    def __init__(self, machine: _Machine, rank: int, program: Program, done: tuple[tuple[Action, ...], ...]):
        self._machine, self._rank, self._program, self._done = machine, rank, program, done
        self._received = frozenset(program)
        self._at: Action | None = None
        self._queues: dict[Hashable, deque[_Item]] = {}
        # Of all queues: items issued, and the number below which all have been dispatched. Of the compute queue: items
        # issued and finished.
        self._num_issued = self._next = self._num_compute = self._num_computed = 0
        self._host = self._steps()

    def ended(self) -> bool:
        return self._at is None and not any(self._queues.values())

    def position(self) -> str:
        return str(self._at) if self._at else "its end, with messages under way"

    def advance(self) -> bool:
        """Advance host and device as far as possible; whether anything happened."""
        moved = False
        while next(self._host, False) or self._run_device():
            moved = True
        return moved

    def _steps(self) -> Iterator[bool]:
        """The host: True after each step, False while it waits."""
        model, loaded = self._machine.model, set[ActionKind]()
        for action, sends in zip(self._program, self._done, strict=True):
            self._at = action
            for send in sends if model.waits_for_sends else ():
                self._issue(Streams.COMPUTE, send, is_wait=True)
            if action.kind in _OTHER_END:
                yield from self._connect(action)
                self._issue(self._stream(action), action)
            elif action.kind.computes:
                read = _READS.get(action.kind)
                if read is not None and action._replace(kind=read) in self._received:
                    self._issue(Streams.COMPUTE, action._replace(kind=read), is_wait=True)
                is_first = model.drains is Drains.FIRST_KERNEL and action.kind not in loaded
                if model.drains is Drains.ALWAYS or is_first:
                    yield from self._drain()
                loaded.add(action.kind)
                self._issue(Streams.COMPUTE, action)
            yield True
        self._at = None

    def _connect(self, message: Action) -> Iterator[bool]:
        """Make the communicator of a message, if this is its first."""
        machine, peer = self._machine, self._machine.peer(message)
        pair = (machine.group(message, self._rank), frozenset((self._rank, peer)))
        if not machine.model.lazy_communicators or (self._rank, pair) in machine.users:
            return
        if machine.model.drains in (Drains.COMMUNICATOR, Drains.ALWAYS):
            yield from self._drain()
        machine.users.add((self._rank, pair))
        yield True
        while (peer, pair) not in machine.users:
            yield False

    def _drain(self) -> Iterator[bool]:
        while any(self._queues.values()):
            yield False

    def _stream(self, message: Action) -> Hashable:
        streams, group = self._machine.model.streams, self._machine.group(message, self._rank)
        if streams is Streams.PAIR:
            return group, self._machine.peer(message)
        return group if streams is Streams.GROUP else streams

    def _issue(self, stream: Hashable, action: Action, *, is_wait: bool = False) -> None:
        after = 0 if stream is Streams.COMPUTE else self._num_compute
        self._queues.setdefault(stream, deque()).append(_Item(action, is_wait, after, self._num_issued))
        self._num_issued += 1
        self._num_compute += stream is Streams.COMPUTE

    def _run_device(self) -> bool:
        """Start and finish the items that can be; whether any finished."""
        moved = False
        for stream, queue in self._queues.items():
            while queue and self._has_started(queue[0]) and self._has_finished(queue[0]):
                queue.popleft()
                self._num_computed += stream is Streams.COMPUTE
                moved = True
        return moved

    def _has_started(self, item: _Item) -> bool:
        """Whether the item at the head of a queue has started; it is started if it may."""
        if self._num_computed < item.after or (self._machine.model.in_order and item.number > self._next):
            return False
        if item.is_wait and not self._machine.has_passed(item.action):
            return False
        self._next = max(self._next, item.number + 1)
        if not item.is_wait and item.action.kind in _OTHER_END:
            self._machine.started.add(item.action)
        return True

    def _has_finished(self, item: _Item) -> bool:
        return item.action.kind not in _OTHER_END or self._machine.has_passed(item.action)
