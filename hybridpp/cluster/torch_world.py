"""The world of ``torch.distributed``, and the groups that its ranks share."""

import atexit
import gc
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from copy import copy
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from hybridpp.cluster.devices import default_device
from hybridpp.cluster.exit_reports import ExitReports
from hybridpp.cluster.failure_hook import FailureHook
from hybridpp.cluster.gather_numbers import gather_numbers
from hybridpp.cluster.hang_report import group_key
from hybridpp.cluster.missing_ranks import reporting_missing
from hybridpp.cluster.patient_store import PATIENCE_S, SilentStoreError, ask, ignore_late_answers_at_exit
from hybridpp.cluster.process_watch import ProcessWatch
from hybridpp.cluster.progress import CONNECTION, Awaited, Progress
from hybridpp.cluster.stop_request import StopRequest
from hybridpp.cluster.torch_group import TorchGroup
from hybridpp.cluster.watchdog import Watchdog, WatchedRank
from hybridpp.cluster.watchdog_board import WatchdogBoard
from hybridpp.cluster.watchdog_limits import WatchdogLimits
from hybridpp.cluster.world import Group
from hybridpp.errors import LaunchError, PeerTimeoutError
from hybridpp.nn.torch_private import HashStore, Store, default_store, nccl_options, timeout_of

T = TypeVar("T")
_Key = tuple[str, tuple[tuple[int, ...], ...]]
# Thread blocks that move a message: by NVLink's rates, four move 33 MB (4096 tokens of width 4096) in half a ms.
_MESSAGE_CTAS = 4
_CHANGING_GROUPS = "making or closing groups of ranks (a plugin, booster.boost or plugin.close)"
_MAKING = "to make groups with it. Every rank must make the same plugins, and boost the same models"


class TorchWorld:
    """Every rank of the initialised default process group.

    A group takes threads, descriptors and, on devices, memory; so equal groups are shared.

    Args:
        shared_memory: as in :class:`~hybridpp.cluster.torch_group.TorchGroup`, for all groups.
        local_rank: this process among those of its host; None: all ranks are on one host.
        progress: what this rank is doing; None: it has done nothing yet.

    Attributes:
        process_group: the default group.
        exit_reports: how ranks ended.
        failures: prints the error that ends this rank; None: the script joined the job by itself.
        left: called when this process has left the job.
        stop: whether the job was told to stop.
        progress: what this rank is doing.
    """

    def __init__(
        self, shared_memory: bool = True, local_rank: int | None = None, progress: Progress | None = None
    ) -> None:
        default = dist.group.WORLD
        assert default is not None, "the default group is initialised"
        self.process_group: dist.ProcessGroup | None = default
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.local_rank = self.rank if local_rank is None else local_rank
        self._timeout = timeout_of(default)
        self._store = default_store()
        ignore_late_answers_at_exit(self._store)
        self.exit_reports = ExitReports(self._store, self.rank)
        self.failures: FailureHook | None = None
        self.left: Callable[[], None] = lambda: None
        self.stop = StopRequest()
        self.progress = Progress() if progress is None else progress
        self._process_watch: ProcessWatch | None = None
        self._watchdog: Watchdog | None = None
        self._shared_memory = shared_memory
        self._control: TorchGroup | None = None
        self._alone: TorchGroup | None = None
        # In order of creation, the same on all ranks; None: this rank is in none of the lists.
        self._groups: dict[_Key, TorchGroup | None] = {}
        self._users: dict[_Key, WeakSet[TorchGroup]] = {}
        self._num_made = self._num_meetings = self._num_connections = 0

    @property
    def device(self) -> torch.device:
        """The device that the default group is bound to, else the current CUDA device if there is one, else the CPU."""
        # A script that initialised the group itself may have named the device there only.
        bound: torch.device | None = getattr(self.process_group, "bound_device_id", None)
        return bound or default_device()

    def carries(self, device: torch.device) -> bool:
        """See :meth:`hybridpp.cluster.world.World.carries`."""
        # As in "cpu:gloo,cuda:nccl". A group of one rank sends nothing.
        backends = dist.get_backend_config(self.process_group).split(",")
        return self.size == 1 or device.type in {backend.partition(":")[0] for backend in backends}

    def split(
        self, groups: Sequence[Sequence[int]], name: str = "", *, point_to_point: bool = False
    ) -> TorchGroup | None:
        """See :meth:`hybridpp.cluster.world.World.split`."""
        if self.process_group is None:
            raise LaunchError("this job was left: destroy() was called. Launch again, and make a new plugin.")
        lists = tuple(tuple(sorted(ranks)) for ranks in groups)
        if all(len(ranks) == 1 for ranks in lists):
            # On every rank: where the default group is bound to devices, NCCL splits its communicator for a group.
            single = self._single()
            return single if (self.rank,) in lists else None
        key = (name, lists)
        rows = self._meet(self._started(key))
        if key in self._groups and not _are_alike(rows, lists):
            self._close(key)
        if key not in self._groups:
            self._groups[key] = self._make(lists, name, point_to_point)
            self._users[key] = WeakSet()
            self._num_made += 1
        group = self._groups[key]
        if group is None:
            return None
        # A copy per user; weak references to the copies show whether the group is still used.
        shared = copy(group)
        self._users[key].add(shared)
        return shared

    def meeting(self, what: str = _MAKING) -> AbstractContextManager[None]:
        """See :meth:`hybridpp.cluster.world.World.meeting`; ``what`` the ranks meet for."""
        self._num_meetings += 1
        return reporting_missing(self._store, self.rank, self.size, f"hybridpp meeting {self._num_meetings}", what)

    def release_unused(self) -> None:
        """See :meth:`hybridpp.cluster.world.World.release_unused`."""
        num_made, self._num_made = self._num_made, 0
        if num_made not in (0, len(self._groups)):
            # A model and its engine know each other, so that only the collector finds that nobody needs them.
            gc.collect()
            self._close_unused(_MAKING)

    def release(self, groups: Iterable[Group]) -> None:
        """See :meth:`hybridpp.cluster.world.World.release`."""
        if self.process_group is None:
            return
        for group in groups:
            for users in self._users.values():
                if group in users and isinstance(group, TorchGroup):
                    users.discard(group)
                    group.detach()
        self._close_unused("to close a plugin with it. Every rank must call plugin.close()")

    def _close_unused(self, what: str) -> None:
        keys = list(self._groups)
        used = self._meet(torch.tensor([len(self._users[key]) for key in keys], dtype=torch.int64), what)
        for index, key in enumerate(keys):
            if not any(row[index] for row in used):
                self._close(key)

    def common_results(self, kind: Hashable) -> None:
        """None: each process computes for itself."""

    def control(self) -> TorchGroup:
        """All ranks over gloo, whatever the backend of the data. Collective at the first call."""
        if self._control is None:
            # Before the collective below: the store may end with the first rank that leaves.
            self._single()
            group = self.process_group
            if group is None or dist.get_backend() != "gloo":
                group = self._new_group(None, backend="gloo", group_desc="hybridpp control")
            self._control = self._group(group, "all ranks")
        return self._control

    def watch(self, limits: WatchdogLimits, store: Store) -> Watchdog:
        """Make a watchdog of this rank; start it when every rank has made one.

        Args:
            limits: of the sections.
            store: of the job; the watchdog makes a connection of its own.
        """
        reports = self.exit_reports
        rank = WatchedRank(self.progress, self._num_started, reports.exit_reason, reports.is_first_here)
        self._watchdog = Watchdog(WatchdogBoard(store, self.rank, self.size, limits.step / 2), rank, limits)
        atexit.register(self._watchdog.stop)
        return self._watchdog

    def watch_processes(self, watch: ProcessWatch, *, store_ends_with_rank_0: bool) -> None:
        """Let a watch, which has begun, know how ranks end, until this one leaves the job.

        Args:
            watch: of this rank.
            store_ends_with_rank_0: whether that rank hosts it.
        """

        def has_left(rank: int) -> bool:
            is_seen = self.control().has_left(rank)
            if is_seen is not None:
                return is_seen
            # What rank 0 reported is gone with it. A rank that waits for it notices its end by itself.
            return (rank == 0 and store_ends_with_rank_0) or self.exit_reports.has_left(rank)

        self._process_watch = watch
        watch.joined(self.exit_reports.exit_reason, has_left)
        atexit.register(watch.stop)

    def tell_end(self) -> None:
        """Tell the other ranks that this one leaves the job in order, also where the store ends with it."""
        if self._control is not None:
            self._control.leave()

    def _num_started(self) -> dict[str, int]:
        """How many collectives of each group this rank has started; called by the watchdog's thread."""
        groups = [self._control, *list(self._groups.values())]
        started = {group_key(group.name, group.ranks): group.started[0] for group in groups if group is not None}
        return started | {group_key("", range(self.size)): self._num_connections}

    def leave(self) -> None:
        """Leave the job, and release all resources of its groups in this process."""
        if self._process_watch is not None:
            atexit.unregister(self._process_watch.stop)
            self._process_watch.stop()
        if self._watchdog is not None:
            atexit.unregister(self._watchdog.stop)
            self._watchdog.stop()
        error = sys.exception()
        if error is None:
            self.tell_end()
            self.exit_reports.report_success()
            self.stop.notes.ended()
        # In a `finally` of a script that fails, it is printed when the store is gone.
        if self.failures is not None and error is not None:
            self.failures.decide(error)
        elif self.failures is not None:
            self.failures.remove()
        self.stop.ignore()
        for key in list(self._groups):
            self._close(key)
        for group in (self._control, self._alone):
            if group is not None:
                group.release()
        # Plugins that still exist keep this object alive.
        self.process_group = None
        self._store = self.exit_reports.store = HashStore()
        dist.destroy_process_group()
        self.left()

    def _group(self, process_group: dist.ProcessGroup, name: str) -> TorchGroup:
        return TorchGroup(process_group, self._shared_memory, name, self.exit_reports.exit_reason, self.progress)

    def _single(self) -> TorchGroup:
        """The group of this rank alone; one such group serves all, because it sends nothing."""
        if self._alone is None:
            own = self._new_group([self.rank], group_desc="hybridpp one rank", use_local_synchronization=True)
            self._alone = self._group(own, "this rank alone")
        return self._alone

    def _new_group(self, ranks: list[int] | None, **options: Any) -> dist.ProcessGroup:
        """A new group of ``torch.distributed``; None: of all ranks. Collective: all ranks, or that one alone."""
        others = tuple(rank for rank in range(self.size) if rank != self.rank and ranks != [self.rank])
        self._num_connections += len(others) > 0
        number = self._num_connections
        self.progress.begin_wait(lambda: Awaited(CONNECTION, others, "", number))
        try:
            with self.progress.connecting():
                group: dist.ProcessGroup = connected(
                    lambda: dist.new_group(ranks, timeout=self._timeout, **options), self._timeout
                )
            return group
        except (SilentStoreError, dist.DistStoreError) as error:
            raise PeerTimeoutError(
                f"ranks did not connect within {self._timeout.total_seconds():.0f} s: {str(error).splitlines()[0]}. A "
                "host may be down or cut off, or a rank, or the process that hosts the job's store (rank 0, or "
                "torchrun's agent on its host), is stopped or has ended."
            ) from error
        finally:
            self.progress.end_wait()

    def _make(self, lists: Sequence[Sequence[int]], name: str, point_to_point: bool) -> TorchGroup | None:
        own = None
        for ranks in lists:
            process_group = self._new_group(
                list(ranks),
                pg_options=_nccl_options(self._timeout) if point_to_point and _uses_nccl() else None,
                group_desc=f"hybridpp {name}",
            )
            if self.rank in ranks:
                own = self._group(process_group, name)
        return own

    def _close(self, key: _Key) -> None:
        group, users = self._groups.pop(key), self._users.pop(key)
        if group is None:
            return
        process_group = group.process_group
        for each in (group, *users):
            each.release()
        dist.destroy_process_group(process_group)

    def _started(self, key: _Key) -> Tensor:
        """Counts of what this rank started in an existing group, for :func:`_are_alike`."""
        longest = max(map(len, key[1]))
        row = torch.zeros(1 + 2 * longest, dtype=torch.int64)
        group = self._groups.get(key)
        if group is not None:
            collectives, sends, receives = group.started
            row[0] = collectives
            row[1 : 1 + group.size] = torch.tensor(sends)
            row[1 + longest : 1 + longest + group.size] = torch.tensor(receives)
        return row

    def _meet(self, row: Tensor, what: str = _MAKING) -> list[Tensor]:
        """All-gather a row of every rank before groups change; reports which ranks are missing, and for what."""
        with self.meeting(what):
            rows = gather_numbers(self.control(), _CHANGING_GROUPS, row.tolist())
        return [torch.tensor(numbers, dtype=row.dtype) for numbers in rows]


def connected(connect: Callable[[], T], timeout: timedelta) -> T:
    """What a call of torch returns which connects ranks over the job's store.

    Torch's own time limit does not count where the store's host is cut off meanwhile.

    Raises:
        SilentStoreError: it took longer than the time limit.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def call() -> T:
        if device is not None:  # each thread has its own
            torch.cuda.set_device(device)
        return connect()

    return ask(call, timeout.total_seconds() + PATIENCE_S)


def _uses_nccl() -> bool:
    """Whether device memory of the default group travels over NCCL; other backends refuse its options."""
    return "nccl" in dist.get_backend_config()


def _nccl_options(timeout: timedelta) -> object:
    """Options for messages that are under way while ranks compute.

    Their kernels take multiprocessors from the computation, so they are few; their stream goes first, because the next
    stage waits for them.
    """
    return nccl_options(timeout, is_high_priority_stream=True, max_ctas=_MESSAGE_CTAS)


def _are_alike(rows: Sequence[Tensor], lists: Sequence[Sequence[int]]) -> bool:
    """Whether every message of a group was sent and received, and every collective called by all of it.

    An error may have ended a step halfway; what was under way would arrive in the next.

    Args:
        rows: of every rank: how many collectives it started, sends to and receives from each member.
        lists: of the members.
    """
    longest = max(map(len, lists))
    for ranks in lists:
        if len({int(rows[rank][0]) for rank in ranks}) > 1:
            return False
        sent = torch.stack([rows[rank][1 : 1 + len(ranks)] for rank in ranks])
        received = torch.stack([rows[rank][1 + longest : 1 + longest + len(ranks)] for rank in ranks])
        if not torch.equal(sent, received.t()):
            return False
    return True


_job: TorchWorld | None = None


def job_world(shared_memory: bool, local_rank: int | None = None, progress: Progress | None = None) -> TorchWorld:
    """The world of this process's job: a single object, like the default group of ``torch.distributed``.

    Args:
        shared_memory, local_rank, progress: as in :class:`TorchWorld`; read by the first call of a job.
    """
    global _job
    if _job is None or _job.process_group is not dist.group.WORLD:
        _job = TorchWorld(shared_memory, local_rank, progress)
    return _job


def leave_job() -> None:
    """Leave the job, if the process is in one; it may join another afterwards."""
    global _job
    job, _job = _job, None
    if job is not None and job.process_group is dist.group.WORLD:
        job.leave()
    elif dist.is_initialized():
        dist.destroy_process_group()
