"""Messages between ranks inside one process: delivered at once, or as the strictest device delivers them."""

from collections import defaultdict, deque
from collections.abc import Hashable
from typing import NamedTuple, Protocol

from torch import Tensor


class MessageEnd(NamedTuple):
    """One end of a message.

    Attributes:
        channel: the group, the sending rank and the receiving rank. Messages of a channel arrive in order.
        is_send: this is the sender's end.
        tensor: to send, or to fill.
    """

    channel: tuple[Hashable, int, int]
    is_send: bool
    tensor: Tensor

    @property
    def rank(self) -> int:
        """The rank that posts this end."""
        _, source, target = self.channel
        return source if self.is_send else target

    @property
    def peer(self) -> int:
        """The rank that posts the other end."""
        _, source, target = self.channel
        return target if self.is_send else source


class Messages(Protocol):
    """How messages are delivered."""

    def connect(self, group: Hashable, rank: int, peer: int) -> bool:
        """Record that ``rank`` uses its connection with ``peer``; whether this is the first time."""

    def is_connected(self, group: Hashable, rank: int, peer: int) -> bool:
        """Whether ``rank`` has used its connection with ``peer``, or need not."""

    def post(self, message: MessageEnd) -> list[bool]:
        """Post one end; the list is filled when it is done."""


class Mailboxes:
    """A send is done at once: its tensor is copied, and kept until it is received."""

    def __init__(self) -> None:
        self._sent: defaultdict[Hashable, deque[Tensor]] = defaultdict(deque)
        self._wanted: defaultdict[Hashable, deque[tuple[Tensor, list[bool]]]] = defaultdict(deque)

    def connect(self, group: Hashable, rank: int, peer: int) -> bool:
        return False

    def is_connected(self, group: Hashable, rank: int, peer: int) -> bool:
        return True

    def post(self, message: MessageEnd) -> list[bool]:
        done = [True] if message.is_send else []
        sent, wanted = self._sent[message.channel], self._wanted[message.channel]
        if message.is_send:
            sent.append(message.tensor.clone())
        else:
            wanted.append((message.tensor, done))
        while sent and wanted:
            target, received = wanted.popleft()
            _deliver(sent.popleft(), target)
            received.append(True)
        return done


class MessageQueues:
    """Each rank has one queue: a message passes when both its ends are at the heads of their ranks' queues."""

    def __init__(self) -> None:
        self._queues: defaultdict[int, deque[tuple[MessageEnd, list[bool]]]] = defaultdict(deque)
        self._users: set[tuple[Hashable, int, int]] = set()

    def connect(self, group: Hashable, rank: int, peer: int) -> bool:
        is_first = (group, rank, peer) not in self._users
        self._users.add((group, rank, peer))
        return is_first

    def is_connected(self, group: Hashable, rank: int, peer: int) -> bool:
        return (group, rank, peer) in self._users

    def post(self, message: MessageEnd) -> list[bool]:
        done: list[bool] = []
        self._queues[message.rank].append((message, done))
        changed = [message.rank]
        while changed:
            changed += self._pass_head(self._queues[changed.pop()])
        return done

    def _pass_head(self, own: deque[tuple[MessageEnd, list[bool]]]) -> tuple[int, ...]:
        """Let the message at the head of a queue pass if it can; the ranks whose queues have new heads."""
        if not own:
            return ()
        message, done = own[0]
        other = self._queues[message.peer]
        if not other or other[0][0].channel != message.channel or other[0][0].is_send == message.is_send:
            return ()
        end, other_done = other.popleft()
        own.popleft()
        source, target = (message, end) if message.is_send else (end, message)
        _deliver(source.tensor, target.tensor)
        done.append(True)
        other_done.append(True)
        return message.rank, message.peer


def _deliver(sent: Tensor, target: Tensor) -> None:
    # copy_ would broadcast and cast, where a real backend would misinterpret the data.
    assert (sent.shape, sent.dtype) == (target.shape, target.dtype), (
        f"sent {sent.dtype} {tuple(sent.shape)}, expected {target.dtype} {tuple(target.shape)}"
    )
    target.copy_(sent)
