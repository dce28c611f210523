"""Ranks inside one process, for tests and single-process runs.

Each rank is a thread, but only one runs at a time, until it waits for another rank. So runs are deterministic, torch's
per-process random generator is saved and restored per rank, and a deadlock is detected as soon as every rank waits.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import copy_context
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from hybridpp.cluster.world import Group, Pending, Work, check_real, override
from hybridpp.errors import DeadlockError

T = TypeVar("T")


class _Aborted(BaseException):
    """Ends a rank whose peer has failed; it does not leave :meth:`Loopback.run`."""


class _TurnTaking:
    """Lets one thread of ``size`` run at a time."""

    def __init__(self, size: int):
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._waiting: dict[int, tuple[int, str]] = {}
        self._alive = set(range(size))
        self._posted = 0
        self.failure: BaseException | None = None

    def start(self) -> None:
        self._turns[0].release()

    def acquire(self, rank: int) -> None:
        self._turns[rank].acquire()

    def post(self) -> None:
        """Record that something was sent that a waiting rank may need."""
        self._posted += 1

    def _pass_on(self, rank: int) -> None:
        order = sorted(self._alive, key=lambda other: (other <= rank, other))
        if order:
            self._turns[order[0]].release()

    def wait_until(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        while not ready():
            if self.failure is not None:
                raise _Aborted
            self._waiting[rank] = (self._posted, what)
            if all(self._waiting.get(other, (-1,))[0] == self._posted for other in self._alive):
                places = "; ".join(f"rank {other} waits for {self._waiting[other][1]}" for other in sorted(self._alive))
                raise DeadlockError(f"every rank waits for another: {places}.")
            # Each rank has its own generator state, as in separate processes.
            generator = torch.default_generator.get_state()
            self._pass_on(rank)
            self.acquire(rank)
            torch.default_generator.set_state(generator)
        self._waiting.pop(rank, None)

    def leave(self, rank: int) -> None:
        self._alive.discard(rank)
        self._waiting.pop(rank, None)
        self._pass_on(rank)


class Loopback:
    """A world of ``size`` ranks in this process.

    Example:
        >>> from hybridpp.cluster import current_world
        >>> Loopback(2).run(lambda: current_world().rank)
        [0, 1]
    """

    def __init__(self, size: int):
        self.size = size
        self._turns = _TurnTaking(size)
        self._shared: dict[Any, Any] = {}

    def run(self, function: Callable[[], T]) -> list[T]:
        """Call ``function`` once on every rank and return the results in rank order.

        Raises:
            Exception: the first that any rank raised; the other ranks are ended.
        """
        turns = self._turns = _TurnTaking(self.size)
        self._shared = {}
        results: list[Any] = [None] * self.size

        def work(rank: int) -> None:
            turns.acquire(rank)
            try:
                override.set(LoopbackWorld(self, rank))
                if turns.failure is None:
                    results[rank] = function()
            except _Aborted:
                results[rank] = None
            except BaseException as error:
                turns.failure = turns.failure or error
            finally:
                turns.leave(rank)

        contexts = [copy_context() for _ in range(self.size)]
        threads = [threading.Thread(target=contexts[rank].run, args=(work, rank)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        turns.start()
        for thread in threads:
            thread.join()
        failure, turns.failure = turns.failure, None
        if failure is not None:
            try:
                raise failure
            finally:
                # The error refers to the ranks' objects, which references to their groups would keep alive.
                del failure
        return results


class LoopbackWorld:
    """One rank's view of a :class:`Loopback`."""

    def __init__(self, loopback: Loopback, rank: int):
        self.rank = rank
        self.size = loopback.size
        self.device = torch.device("cpu")
        self._loopback = loopback
        self._num_splits = 0
        self._control: LoopbackGroup | None = None

    def split(self, groups: Sequence[Sequence[int]], name: str = "") -> "LoopbackGroup | None":
        self._num_splits += 1
        for ranks in groups:
            if self.rank in ranks:
                return LoopbackGroup(self._loopback, (self._num_splits, tuple(sorted(ranks))), self.rank)
        return None

    def release_unused(self) -> None:
        """Groups in one process take nothing."""

    def release(self, groups: Iterable[Group]) -> None:
        """Groups in one process take nothing."""

    def control(self) -> "LoopbackGroup":
        # One object, because a group numbers its collectives.
        if self._control is None:
            self._control = LoopbackGroup(self._loopback, ("control", tuple(range(self.size))), self.rank)
        return self._control


class _Done:
    """A completed communication."""

    def wait(self) -> None:
        return


class _Pending:
    """A communication that is complete when ``ready`` returns True."""

    def __init__(self, turns: _TurnTaking, rank: int, ready: Callable[[], bool], what: str):
        self._arguments = (rank, ready, what)
        self._turns = turns

    def wait(self) -> None:
        self._turns.wait_until(*self._arguments)


class _Result(Generic[T]):
    """The result of a pending communication."""

    def __init__(self, work: Work, finish: Callable[[], T]):
        self._work, self._finish = work, finish

    def wait(self) -> T:
        self._work.wait()
        return self._finish()


def _sum(parts: list[Tensor]) -> None:
    total = torch.stack([part.detach() for part in parts]).sum(0)
    for part in parts:
        part.detach().copy_(total)


class _Mailbox:
    """Messages from one rank to another, matched with receives in order."""

    def __init__(self) -> None:
        self.messages: deque[Tensor] = deque()
        self.receives: deque[tuple[Tensor, list[bool]]] = deque()

    def match(self) -> None:
        while self.messages and self.receives:
            target, done = self.receives.popleft()
            message = self.messages.popleft()
            # copy_ would broadcast and cast, where a real backend would misinterpret the data.
            assert (message.shape, message.dtype) == (target.shape, target.dtype), (
                f"sent {message.dtype} {tuple(message.shape)}, expected {target.dtype} {tuple(target.shape)}"
            )
            target.copy_(message)
            done.append(True)


class LoopbackGroup:
    """Ranks of a :class:`Loopback` that communicate through shared memory."""

    process_group = None
    overlaps = True

    def __init__(self, loopback: Loopback, key: tuple[Any, tuple[int, ...]], rank: int):
        self.ranks = key[1]
        self.rank = self.ranks.index(rank)
        self.size = len(self.ranks)
        self._world_rank = rank
        self._key = key
        self._turns = loopback._turns
        self._shared = loopback._shared
        self._num_collectives: dict[str, int] = {}

    def _collect(
        self, kind: str, tensor: Tensor, finish: Callable[[list[Tensor]], None]
    ) -> tuple[dict[int, Tensor], _Pending]:
        """Submit this rank's tensor; the last rank calls ``finish`` on all of them, in rank order."""
        check_real(tensor)
        turn = self._num_collectives[kind] = self._num_collectives.get(kind, 0) + 1
        key = (self._key, kind, turn)
        parts: dict[int, Tensor] = self._shared.setdefault(key, {})
        parts[self.rank] = tensor
        self._turns.post()
        if len(parts) == self.size:
            finish([parts[member] for member in range(self.size)])
            del self._shared[key]
        what = f"{kind} number {turn} of ranks {self.ranks}"
        return parts, _Pending(self._turns, self._world_rank, lambda: len(parts) == self.size, what)

    def all_reduce(self, tensor: Tensor) -> Work:
        return self._collect("all_reduce", tensor, _sum)[1]

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return self.start_all_gather(tensor).wait()

    def start_all_gather(self, tensor: Tensor) -> Pending[list[Tensor]]:
        parts, pending = self._collect("all_gather", tensor.detach().clone(), lambda parts: None)
        return _Result(pending, lambda: [parts[member].clone() for member in range(self.size)])

    def all_gather_along(self, tensor: Tensor, dim: int) -> Tensor:
        return torch.cat(self.all_gather(tensor), dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        return self.start_reduce_scatter(tensor, dim).wait()

    def start_reduce_scatter(self, tensor: Tensor, dim: int) -> Pending[Tensor]:
        total = tensor.detach().clone()
        pending = self._collect("reduce_scatter", total, _sum)[1]
        return _Result(pending, lambda: total.chunk(self.size, dim)[self.rank].contiguous())

    def _mailbox(self, source: int, target: int) -> _Mailbox:
        box: _Mailbox = self._shared.setdefault((self._key, source, target), _Mailbox())
        return box

    def send(self, tensor: Tensor, peer: int) -> Work:
        check_real(tensor)
        box = self._mailbox(self.rank, peer)
        box.messages.append(tensor.detach().clone())
        box.match()
        self._turns.post()
        return _Done()

    def receive(self, tensor: Tensor, peer: int) -> Work:
        check_real(tensor)
        box = self._mailbox(peer, self.rank)
        done: list[bool] = []
        box.receives.append((tensor.detach(), done))
        box.match()
        what = f"a message from rank {self.ranks[peer]}"
        return _Pending(self._turns, self._world_rank, lambda: bool(done), what)
