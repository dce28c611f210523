"""Messages between two processes of one host, through memory that both see.

The sender copies a message into memory of its own, the receiver out of it; a byte on a Unix socket wakes a receiver
that sleeps. TCP, which gloo uses, copies through the kernel, and wakes a thread of its own on either side.
"""

import ctypes
import errno
import functools
import os
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack

from torch import Tensor

from hybridpp.cluster.exit_reports import NO_REPORT, timeout_error
from hybridpp.cluster.progress import Awaited, Progress
from hybridpp.cluster.shared_memory.message_log import Channel, Inbox, Outbox
from hybridpp.cluster.shared_memory.peer_process import PeerProcess, no_descriptors
from hybridpp.cluster.shared_memory.spinning import Spinning
from hybridpp.cluster.world import check_real
from hybridpp.errors import PeerError

# How often a rank that waits for longer looks at what wakes nobody: what the peer has asked for.
_LOOK_S = 2e-4
# How often one that sleeps looks, although nobody woke it: the system may have had no memory to wake it.
_SLEEP_S = 0.1


class Link:
    """One end of a connection to another process: messages of a channel arrive in the order they were sent, both ways.

    A send never waits: messages that the peer has not received stay in this rank's memory, however many there are.

    A link belongs to the process that made it: in a process that is forked from that one it is closed.

    Args:
        connection: a connected Unix socket (a stream) whose other end is a ``Link``, too; it is closed with the link.
        peer: name of the peer in errors: ``"rank 1"``.
        timeout_s: time limit in seconds for waiting for the peer.
        exit_reason: returns why the peer has ended, if it reported that.

    Raises:
        ResourceError: there is no memory for it.
        OSError: the system does not support this, or a limit is reached.

    Attributes:
        progress: of this rank; told of waits for the peer.
        awaited: what such a wait is for.
    """

    def __init__(self, connection: socket.socket, peer: str, timeout_s: float, exit_reason: Callable[[], str] = str):
        self._peer, self._timeout_s, self._exit_reason = peer, timeout_s, exit_reason
        self.progress = Progress()
        self.awaited = Awaited("a message", (), "")
        self._why_closed: str | None = None
        self._num_sent = [0 for _ in Channel]
        self._expected: tuple[deque[ReceiveWork], ...] = tuple(deque() for _ in Channel)
        self._spinning = Spinning()
        self._inbox: Inbox | None = None
        with ExitStack() as resources:
            resources.callback(connection.close)
            try:
                self._process = PeerProcess(connection)
                resources.callback(self._process.close)
                self._outbox = Outbox()
                resources.callback(self._outbox.close)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise no_descriptors() from error
                raise
            # A peer that has already ended is an error only when it is needed.
            try:
                self._process.greet(self._outbox.arena.descriptor)
            except (BrokenPipeError, ConnectionResetError):
                self._process.has_ended = True
            resources.callback(_shut_down, self._process, os.getpid())
            self._resources = resources.pop_all()
        self._close = weakref.finalize(self, self._resources.close)
        _close_in_forked_children()
        _LINKS.add(self)

    def send(self, tensor: Tensor, channel: Channel = Channel.POINT_TO_POINT) -> "SendWork":
        """Send a contiguous tensor in host memory; it may be written again at once.

        Raises:
            PeerError: the peer has ended.
            PartitionError: the tensor has no data.
            ResourceError: there is no memory for it.
        """
        self._check_open()
        check_real(tensor)
        outbox = self._outbox
        if self._has_met():
            outbox.free(self.meet().num_taken(outbox.num_sent))
        outbox.add(tensor.data_ptr(), tensor.nbytes, channel)
        try:
            self._process.wake()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._is_gone() from error
        self._num_sent[channel] += 1
        return SendWork(self, channel, self._num_sent[channel])

    def receive(self, tensor: Tensor, channel: Channel = Channel.POINT_TO_POINT) -> "ReceiveWork":
        """Request the next message, into a contiguous ``tensor`` of its size in host memory."""
        self._check_open()
        check_real(tensor)  # a fake tensor would be written to at address 0
        self._outbox.ask(channel)
        receive_work = ReceiveWork(self, channel, tensor)
        self._expected[channel].append(receive_work)
        return receive_work

    def wait_until_asked(self, channel: Channel, number: int) -> None:
        """Wait until the peer has requested so many messages."""
        self._check_open()
        inbox = self.meet()
        if inbox.num_asked(channel) < number:
            self._wait(lambda: inbox.num_asked(channel) >= number, self._look)

    def take(self, channel: Channel) -> None:
        """Wait for the next message, and copy it to the tensor of the oldest request."""
        self._check_open()
        inbox = self.meet()
        if not self._spinning.until(lambda: inbox.has_message(channel)):
            self._wait(lambda: inbox.has_message(channel), self._process.sleep)
        message = inbox.take(channel)
        receive_work = self._expected[channel].popleft()
        tensor = receive_work.tensor
        if tensor.nbytes != message.size:
            raise PeerError(
                f"{self._peer} sent {message.size} bytes for a tensor of {tensor.nbytes} ({tuple(tensor.shape)}, "
                f"{tensor.dtype}): the ranks do not do the same. Start all of them with one script, model and batch, "
                "and put no `if coordinator.is_master()` around calls that communicate, such as booster.save_model."
            )
        ctypes.memmove(tensor.data_ptr(), message.address, message.size)
        self._outbox.take(message)
        receive_work.is_done = True

    def has_arrived(self, channel: Channel) -> bool:
        """Whether :meth:`take` would not wait."""
        return self._why_closed is None and self._has_met() and self.meet().has_message(channel)

    def meet(self, timeout_s: float | None = None) -> Inbox:
        """Wait until the peer has opened its end; its messages can be read from then on."""
        if self._inbox is None:
            self._wait(self._has_met, self._process.sleep_until_greeted, timeout_s)
            assert self._inbox is not None
        return self._inbox

    def leave(self) -> None:
        """Tell the peer that this rank leaves the job in order; nothing is waited for."""
        if self._close.alive:
            self._outbox.leave()

    @property
    def has_left(self) -> bool:
        """Whether the peer has left the job in order."""
        return self._inbox is not None and self._why_closed is None and self._inbox.has_left

    def close(self) -> None:
        """Release connection and memory; may be called again. The peer can still read sent messages.

        The link cannot be used afterwards.
        """
        self._why_closed = (
            f"the connection to {self._peer} is closed: its group was released. Communicate before that, or make a "
            "new group."
        )
        if self._close.alive:
            self._outbox.end()
        self._close()

    def disown(self) -> None:
        """Close the copy of a link in a forked process; the parent's link is not affected."""
        self._why_closed = (
            f"the connection to {self._peer} belongs to the process that this one was forked from. Communicate there."
        )
        self._close()

    def _has_met(self) -> bool:
        if self._inbox is not None:
            return True
        descriptor = self._process.greeting(self._peer)
        if descriptor is None:
            return False
        try:
            self._inbox = Inbox(descriptor, self._peer)
        finally:
            os.close(descriptor)
        self._resources.callback(self._inbox.close)
        return True

    def _wait(
        self, is_ready: Callable[[], bool], sleep: Callable[[float], None], timeout_s: float | None = None
    ) -> None:
        self.progress.begin_wait(lambda: self.awaited)
        try:
            self._wait_until(is_ready, sleep, self._timeout_s if timeout_s is None else timeout_s)
        finally:
            self.progress.end_wait()

    def _wait_until(self, is_ready: Callable[[], bool], sleep: Callable[[float], None], timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while True:
            # Read before the check, so that everything the peer did before it ended is seen.
            has_ended = self._process.has_ended
            if is_ready():
                return
            if has_ended:
                raise self._is_gone()
            if self.progress.lost:  # what the peer waits for, itself or through others
                raise PeerError(self.progress.lost)
            left = until - time.monotonic()
            if left <= 0:
                raise timeout_error(self._peer, timeout_s, self.progress.location())
            sleep(min(left, _SLEEP_S))

    def _look(self, seconds: float) -> None:
        time.sleep(min(seconds, _LOOK_S))
        self._process.sleep(0)

    def _check_open(self) -> None:
        if self._why_closed is not None:
            raise PeerError(self._why_closed)

    def _is_gone(self) -> PeerError:
        why = self._exit_reason()
        if self._inbox is not None and (self._inbox.is_closed or (self._inbox.has_left and not why)):
            return PeerError(
                f"{self._peer} has closed its end of this group, and this rank has not. All ranks must call together "
                f"what communicates, and give a group back after that. {why}".rstrip()
            )
        return PeerError(f"{self._peer} is gone: its process has ended. {why or NO_REPORT}")


# Links of this process. In a forked one (a data loader's worker) they would keep connections open that the parent
# closes, and write into the parent's memory.
_LINKS: weakref.WeakSet[Link] = weakref.WeakSet()


@functools.cache
def _close_in_forked_children() -> None:
    def disown() -> None:
        for link in list(_LINKS):
            link.disown()
        _LINKS.clear()

    os.register_at_fork(after_in_child=disown)


def _shut_down(process: PeerProcess, owner: int) -> None:
    # A forked child must not shut down a connection that it shares with the parent.
    if os.getpid() == owner:
        process.shut_down()


class SendWork:
    """A sent message, which the peer may not have requested yet."""

    __slots__ = ("_channel", "_link", "_number")

    def __init__(self, link: Link, channel: Channel, number: int):
        self._link, self._channel, self._number = link, channel, number

    def wait(self) -> None:
        """Wait until the peer has requested it."""
        self._link.wait_until_asked(self._channel, self._number)


class ReceiveWork:
    """A requested message."""

    __slots__ = ("_channel", "_link", "is_done", "tensor")

    def __init__(self, link: Link, channel: Channel, tensor: Tensor):
        self._link, self._channel, self.tensor = link, channel, tensor
        self.is_done = False

    def wait(self) -> None:
        """Wait until the tensor is filled, and earlier requests of its channel are."""
        while not self.is_done:
            self._link.take(self._channel)

    def is_ready(self) -> bool:
        """Whether the tensor is filled; it takes what has arrived."""
        while not self.is_done and self._link.has_arrived(self._channel):
            self._link.take(self._channel)
        return self.is_done
