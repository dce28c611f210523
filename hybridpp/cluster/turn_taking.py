"""Threads that take turns: one runs at a time, until it waits for another."""

import threading
from collections.abc import Callable

import torch

from hybridpp.errors import DeadlockError


class RankAborted(BaseException):
    """Ends a rank whose peer has failed; it does not leave :meth:`Loopback.run`."""


class TurnTaking:
    """Lets one thread of ``size`` run at a time, until it waits for another.

    Attributes:
        failure: the first error of a rank; the others end where they wait next.
        posts: how often each rank has called :meth:`post`.
    """

    def __init__(self, size: int):
        # Held, except by the rank whose turn it is. Locks pass faster than semaphores, which Python implements on them.
        self._turns = [threading.Lock() for _ in range(size)]
        for turn in self._turns:
            turn.acquire()
        self._waiting: dict[int, tuple[int, str, Callable[[], str]]] = {}
        self._alive = set(range(size))
        self._posted = 0
        self.posts = [0] * size
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Let the first rank run."""
        self._turns[0].release()

    def acquire(self, rank: int) -> None:
        """Wait for this rank's turn."""
        self._turns[rank].acquire()

    def post(self, rank: int) -> None:
        """Record that this rank sent something that a waiting rank may need."""
        self._posted += 1
        self.posts[rank] += 1

    def _pass_on(self, rank: int) -> None:
        order = sorted(self._alive, key=lambda other: (other <= rank, other))
        if order:
            self._turns[order[0]].release()

    def wait_until(
        self, rank: int, ready: Callable[[], bool], what: str, location: Callable[[], str] = lambda: ""
    ) -> None:
        """Let others run until ``ready()``.

        Args:
            rank: that waits.
            ready: whether the wait is over.
            what: it waits for, in the error of a deadlock.
            location: where it is, in words, there.

        Raises:
            DeadlockError: every rank waits.
        """
        while not ready():
            if self.failure is not None:
                raise RankAborted
            self._waiting[rank] = (self._posted, what, location)
            if all(self._waiting.get(other, (-1,))[0] == self._posted for other in self._alive):
                waits = "; ".join(self._wait_in_words(other) for other in sorted(self._alive))
                raise DeadlockError(f"every rank waits for another: {waits}.")
            # Each rank has its own generator states, as in separate processes.
            before = [(generator, generator.get_state()) for generator in _generators()]
            self._pass_on(rank)
            self.acquire(rank)
            for generator, state in before:
                generator.set_state(state)
        self._waiting.pop(rank, None)

    def _wait_in_words(self, rank: int) -> str:
        _, what, location = self._waiting[rank]
        where = location()
        return f"rank {rank} waits for {what}" + (f" in {where}" if where else "")

    def leave(self, rank: int) -> None:
        """Run this rank no more."""
        self._alive.discard(rank)
        self._waiting.pop(rank, None)
        self._pass_on(rank)


def _generators() -> tuple[torch.Generator, ...]:
    """The default generators of this process: the host's, and those of the CUDA devices once CUDA is in use."""
    is_in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch
    on_devices = torch.cuda.default_generators if is_in_use else ()
    return torch.default_generator, *on_devices
