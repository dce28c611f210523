"""Ranks inside one process, for tests and single-process runs.

Each rank is a thread, but only one runs at a time, until it waits for another rank. So runs are deterministic, torch's
per-process random generators are saved and restored per rank, and a deadlock is detected as soon as every rank waits.
"""

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from typing import Any, ClassVar, TypeVar

import torch

from hybridpp.cluster.common_results import CommonResults, ResultStores
from hybridpp.cluster.devices import default_device
from hybridpp.cluster.loopback_group import LoopbackGroup
from hybridpp.cluster.loopback_messages import Mailboxes, MessageQueues, Messages
from hybridpp.cluster.progress import Progress
from hybridpp.cluster.stop_request import StopRequest
from hybridpp.cluster.turn_taking import RankAborted, TurnTaking
from hybridpp.cluster.world import Group, override

T = TypeVar("T")
_CPU = torch.device("cpu")


class Loopback:
    """A world of ``size`` ranks in this process.

    Args:
        size: number of ranks.
        in_order: handle messages as the strictest device does: all that a rank sends and receives is in one queue, a
            send is done when it is received, and the first message between two ranks in a group waits for both. What
            may deadlock on a device raises DeadlockError here.
        shares_results: whether one rank computes for all what all would compute: see CommonResults.

    Attributes:
        size: number of ranks.
        turns: that they take, in the latest run.
        shared: collectives there that not all ranks have called yet.
        messages: on their way there.
        results: that the ranks have in common there, by key; None: each rank computes for itself.
        results_of_any_run: those that later runs in this process take, by key; None: there are none. For tests, which
            run equal jobs.

    Example:
        >>> from hybridpp.cluster import current_world
        >>> Loopback(2).run(lambda: current_world().rank)
        [0, 1]
    """

    results_of_any_run: ClassVar[dict[Hashable, Any] | None] = None

    def __init__(self, size: int, *, in_order: bool = False, shares_results: bool = True):
        self.size = size
        # One rank has nobody to share with.
        self.results: dict[Hashable, Any] | None = {} if shares_results and size > 1 else None
        self._in_order = in_order
        self.turns = TurnTaking(size)
        self.shared: dict[Any, Any] = {}
        self.messages: Messages = Mailboxes()

    def run(self, function: Callable[[], T]) -> list[T]:
        """Call ``function`` once on every rank and return the results in rank order.

        Raises:
            Exception: the first that any rank raised; the other ranks are ended.
        """
        turns = self.turns = TurnTaking(self.size)
        self.shared = {}
        self.messages = MessageQueues() if self._in_order else Mailboxes()
        results: list[Any] = [None] * self.size

        def work(rank: int) -> None:
            turns.acquire(rank)
            try:
                override.set(LoopbackWorld(self, rank))
                # A device has one autograd thread for all ranks: in it, a rank would wait for the ranks after it.
                with torch.autograd.set_multithreading_enabled(False):
                    if turns.failure is None:
                        results[rank] = function()
            except RankAborted:
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
        if self.results:
            self.results.clear()
        failure, turns.failure = turns.failure, None
        if failure is not None:
            try:
                raise failure
            finally:
                # The error refers to the ranks' objects, which references to their groups would keep alive.
                del failure
        return results


class LoopbackWorld:
    """One rank's view of a :class:`Loopback`.

    Args:
        loopback: the world.
        rank: this one.
        device: where it computes by default; None: on the CUDA device if there is one, else on the CPU.

    Attributes:
        stop: no signal sets it; a test may.
    """

    def __init__(self, loopback: Loopback, rank: int, device: torch.device | None = _CPU):
        self.rank = self.local_rank = rank
        self.size = loopback.size
        self.progress = Progress()
        self.stop = StopRequest()
        self._device = device
        self._loopback = loopback
        self._num_splits = 0
        self._num_kinds = 0
        self._control: LoopbackGroup | None = None

    @property
    def device(self) -> torch.device:
        # Asked when needed, because asking initialises CUDA.
        return self._device or default_device()

    def carries(self, device: torch.device) -> bool:
        """Ranks of one process share the tensors of every device."""
        return True

    def split(
        self, groups: Sequence[Sequence[int]], name: str = "", *, point_to_point: bool = False
    ) -> LoopbackGroup | None:
        self._num_splits += 1
        for ranks in groups:
            if self.rank in ranks:
                return self._group(self._num_splits, sorted(ranks), name)
        return None

    def _group(self, key: Any, ranks: Iterable[int], name: str) -> LoopbackGroup:
        loopback = self._loopback
        group = LoopbackGroup(loopback.turns, loopback.shared, loopback.messages, (key, tuple(ranks)), self.rank)
        group.name, group.progress = name, self.progress
        return group

    def meeting(self) -> AbstractContextManager[None]:
        """That all ranks wait is found at once."""
        return nullcontext()

    def release_unused(self) -> None:
        """Groups in one process take nothing."""

    def release(self, groups: Iterable[Group]) -> None:
        """Groups in one process take nothing."""

    def common_results(self, kind: Hashable) -> CommonResults | None:
        self._num_kinds += 1
        results, turns = self._loopback.results, self._loopback.turns
        if results is None:
            return None
        stores = ResultStores(results, self._loopback.results_of_any_run)
        return CommonResults((self._num_kinds, kind), stores, lambda: turns.posts[self.rank])

    def control(self) -> LoopbackGroup:
        # One object, because a group numbers its collectives.
        if self._control is None:
            self._control = self._group("control", range(self.size), "all ranks")
        return self._control
