"""Rendezvous of a job's ranks: all of them are present and were launched with the same settings.

It uses a store of ``torch.distributed``, which may hold keys of an earlier attempt of the same job (torchrun restarts
processes and, on one host, keeps its store). So every process writes a numbered request, and rank 0 answers it with the
key prefix of this attempt.
"""

import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hybridpp.cluster.patient_store import PATIENCE_S, SilentStoreError, ask
from hybridpp.cluster.rank_process import ENDED, RankProcess
from hybridpp.errors import ConfigError, HybridppError, LaunchError
from hybridpp.nn.torch_private import PrefixStore, Store, TCPStore

# Not the distributed logger, which needs the world that is created here.
LOGGER = logging.getLogger("hybridpp")

_REQUESTS = "requests"
# Time before a rank logs for whom it waits; the interval doubles with each message.
FIRST_NOTICE_S = 10.0
_POLL_S = 0.01
# How often ranks that wait look whether the processes of those that have come still run.
_LOOK_S = 0.5
# Rank 0 times out first, so that the others get the reason.
_GRACE_S = 5.0
_RANK_0 = "process of rank 0"
_HOW_IT_ENDED = "Its own output says why, if it was not killed."
_REFUSALS: dict[str, type[HybridppError]] = {kind.__name__: kind for kind in (LaunchError, ConfigError)}


@dataclass(frozen=True)
class StoreAddress:
    """Address of the ranks' store.

    Attributes:
        host: its host.
        port: its port there.
        is_external: whether another process (torchrun's agent) hosts it; else rank 0 does.
    """

    host: str
    port: int
    is_external: bool = False

    def open(self, rank: int, timeout_s: float) -> Store:
        """Open the store; raises ``dist.DistNetworkError`` if it cannot be hosted, or not be reached in time."""
        return TCPStore(
            self.host,
            self.port,
            is_master=rank == 0 and not self.is_external,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            # Objects of an earlier job of this process may still hold the store.
            multi_tenant=True,
        )


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What a rank brings to the rendezvous, as JSON holds it.

    Attributes:
        settings: must be equal on all ranks, by argument name.
        own: of this rank.
        address: by which it reaches the store; processes see each other only where it is equal, as copies of a virtual
            machine take themselves for one host.
        decide: rank 0 calls it with ``own`` of all ranks, in order; every rank gets the result, or the ConfigError that
            it raises.
    """

    settings: Mapping[str, object]
    own: Any = None
    address: str = ""
    decide: Callable[[Sequence[Any]], Any] = lambda own: None


def wait_for_ranks(
    address: StoreAddress, rank: int, world_size: int, entry: Entry, timeout_s: float
) -> tuple[Store, Any]:
    """Wait for all ranks; returns a store for this attempt of the job, and what ``entry.decide`` returned.

    Collective: all ranks of the job.

    Args:
        address: of a store that all ranks see.
        rank: this process.
        world_size: number of processes.
        entry: of this rank.
        timeout_s: seconds to wait for the others.

    Raises:
        LaunchError: on every rank that joined: a rank is missing, or has other settings.
        ConfigError: on every rank: ``entry.decide`` raised it on rank 0.
    """
    timer = WaitTimer(rank, timeout_s if rank == 0 else timeout_s + _GRACE_S)
    join = _coordinate if rank == 0 else _register

    def meet() -> tuple[Store, str, Any]:
        store = address.open(rank, min(FIRST_NOTICE_S, max(_POLL_S, timer.left_s)))
        return store, *join(PrefixStore("hybridpp", store), rank, world_size, entry, timer)

    while True:
        try:
            store, name, decision = ask(meet, max(0.0, timer.left_s) + PATIENCE_S)
        except SilentStoreError as error:
            raise LaunchError(
                f"rank {rank} reached the store of the job at {address.host}:{address.port}, which has not answered "
                f"since, for {timeout_s:g} s. The host of rank 0 may be down or cut off, or the process that hosts the "
                "store (rank 0, or torchrun's agent there) is stopped."
            ) from error
        except dist.DistNetworkError as error:
            # The store of an earlier job of these processes may have been reached, and have ended since: once more.
            if (rank == 0 and not address.is_external) or timer.left_s <= 0:
                raise _unreachable(address, rank, timeout_s, error) from error
            timer.wait_on(f"the store of the job at {address.host}:{address.port}")
        else:
            store.set_timeout(timedelta(seconds=timeout_s))
            return PrefixStore(f"hybridpp/{name}", store), decision


class WaitTimer:
    """Measures how long a rank has waited, and logs it from time to time.

    Args:
        rank: this rank, for the messages.
        timeout_s: time limit in seconds.
    """

    def __init__(self, rank: int, timeout_s: float):
        self._rank = rank
        self._start = time.monotonic()
        self.timeout_s = timeout_s
        self._next_notice_s = FIRST_NOTICE_S

    @property
    def left_s(self) -> float:
        """Remaining seconds; negative after the limit."""
        return self.timeout_s - self._waited_s

    @property
    def _waited_s(self) -> float:
        return time.monotonic() - self._start

    def wait_on(self, what: str) -> None:
        """Wait a moment; log from time to time what for."""
        waited_s = self._waited_s
        if waited_s >= self._next_notice_s:
            self._next_notice_s = 2 * waited_s
            LOGGER.warning(
                "[rank %d] has waited %.0f s for %s; gives up after %.0f s", self._rank, waited_s, what, self.timeout_s
            )
        time.sleep(_POLL_S)


def peers_of_host(store: Store, rank: int, address: str) -> dict[int, RankProcess]:
    """The processes of the other ranks that this one sees, in a store that :func:`wait_for_ranks` returned.

    Args:
        store: of the attempt.
        rank: this process.
        address: see :class:`Entry`.
    """
    found = json.loads(store.get(_processes_key(address, RankProcess.own().view)))
    return {other: RankProcess(*process) for other, process in found if other != rank}


def list_ranks(ranks: list[int]) -> str:
    """``rank 3``, or ``ranks 1, 2, 5``; of many, the first."""
    some = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {some}"


def _coordinate(store: Store, rank: int, world_size: int, entry: Entry, timer: WaitTimer) -> tuple[str, Any]:
    """Rank 0: answer requests with the attempt's name until all ranks are present, and decide."""
    name = secrets.token_hex(8)
    store.set(f"{name}/{_RANK_0}", json.dumps([entry.address, *RankProcess.own()]))
    missing, ended = _reply_until_all_joined(store, name, world_size, entry, timer)
    refusal, decision = None, None
    try:
        if ended:
            rank, process = next(iter(ended.items()))
            raise LaunchError(f"rank {rank} ({process}) has ended before all ranks had come. {_HOW_IT_ENDED}")
        if missing:
            raise LaunchError(
                f"{list_ranks(missing)} did not call launch within {timer.timeout_s:g} s; {world_size - len(missing)} "
                f"of {world_size} ranks did. Their own output says why, if they were started; where they only take "
                "longer, raise timeout_s of launch_from_torch or launch."
            )
        entries = [
            json.loads(_as_text(entry)),
            *(json.loads(store.get(_entry_key(name, n))) for n in range(1, world_size)),
        ]
        _check_equal([settings for settings, _, _ in entries])
        decision = entry.decide([own for _, own, _ in entries])
        by_host: dict[str, list[Any]] = {}
        for rank, (_, _, (address, *process)) in enumerate(entries):
            by_host.setdefault(_processes_key(address, RankProcess(*process).view), []).append([rank, process])
        for key, processes in by_host.items():
            store.set(f"{name}/{key}", json.dumps(processes))
    except (LaunchError, ConfigError) as error:
        refusal = error
    store.set(_decision_key(name), json.dumps([refusal and type(refusal).__name__, str(refusal), decision]))
    if refusal is not None:
        # The store may end with this process. Ranks that come late would wait for another rank 0.
        others = world_size - 1 - len(ended or missing)
        until = time.monotonic() + _GRACE_S
        num_replies = 0
        while store.add(_receipt_key(name), 0) < others and time.monotonic() < until:
            num_replies = _reply(store, name, num_replies)
            time.sleep(_POLL_S)
        raise refusal
    return name, decision


def _reply_until_all_joined(
    store: Store, name: str, world_size: int, entry: Entry, timer: WaitTimer
) -> tuple[list[int], dict[int, RankProcess]]:
    """Answer requests with the attempt's name; returns the ranks that are missing when the time is over, or when one
    that has come has ended, and which have."""
    missing = list(range(1, world_size))
    joined: dict[int, list[Any]] = {}
    num_replies, next_look = 0, time.monotonic() + _LOOK_S
    while missing:
        if time.monotonic() > next_look:
            for other in set(range(1, world_size)).difference(missing, joined):
                joined[other] = json.loads(store.get(_entry_key(name, other)))[2]
            seen = {other: RankProcess(*at[1:]) for other, at in joined.items() if at[0] == entry.address}
            if ended := {other: process for other, process in seen.items() if process.condition == ENDED}:
                return missing, ended
            next_look = time.monotonic() + _LOOK_S
        num_replies = _reply(store, name, num_replies)
        missing = [other for other in missing if not store.check([_entry_key(name, other)])]
        if missing and timer.left_s <= 0:
            break
        if missing:
            timer.wait_on(f"{list_ranks(missing)} to call launch")
    return missing, {}


def _reply(store: Store, name: str, num_replies: int) -> int:
    """Answer requests after the first ``num_replies`` with the attempt's name; returns how many there are."""
    # Requests of earlier attempts are answered, too; no process waits for them.
    num_requests: int = store.add(_REQUESTS, 0)
    for number in range(num_replies + 1, num_requests + 1):
        store.set(_reply_key(number), name)
    return num_requests


def _register(store: Store, rank: int, world_size: int, entry: Entry, timer: WaitTimer) -> tuple[str, Any]:
    """Other ranks: request the attempt's name, and wait for what rank 0 decides."""
    number = store.add(_REQUESTS, 1)
    _await(store, _reply_key(number), timer, "rank 0 to call launch")
    name = store.get(_reply_key(number)).decode()
    try:
        return name, _decided(store, name, rank, world_size, entry, timer)
    except dist.DistNetworkError as error:  # rank 0, which has answered in this attempt, or torchrun's agent
        who = "the process that hosts the job's store"
        raise LaunchError(f"{who} has ended while ranks met. {_HOW_IT_ENDED}") from error


def _decided(store: Store, name: str, rank: int, world_size: int, entry: Entry, timer: WaitTimer) -> Any:
    """Join an attempt, and wait for what rank 0 decides."""
    if store.add(f"{name}/processes of rank {rank}", 1) > 1:
        raise LaunchError(f"two processes have rank {rank} of {world_size}. Start each with a rank of its own.")
    store.set(_entry_key(name, rank), _as_text(entry))
    # Rank 0 logs for whom it waits, so this rank does not.
    address, *process = json.loads(store.get(f"{name}/{_RANK_0}"))
    _await(store, _decision_key(name), timer, "", RankProcess(*process) if address == entry.address else None)
    refusal, text, decision = json.loads(store.get(_decision_key(name)))
    if refusal:
        store.add(_receipt_key(name), 1)
        raise _REFUSALS[refusal](text)
    return decision


def _await(store: Store, key: str, timer: WaitTimer, what: str, rank_0: RankProcess | None = None) -> None:
    next_look = time.monotonic() + _LOOK_S
    while not store.check([key]):
        if rank_0 is not None and time.monotonic() > next_look:
            if rank_0.condition == ENDED and not store.check([key]):
                raise LaunchError(f"rank 0 ({rank_0}) has ended while ranks met. {_HOW_IT_ENDED}")
            next_look = time.monotonic() + _LOOK_S
        if timer.left_s <= 0:
            raise LaunchError(
                f"rank 0 did not call launch within {timer.timeout_s:g} s, or does not answer. Its own output says "
                "why, if it was started."
            )
        if what:
            timer.wait_on(what)
        else:
            time.sleep(_POLL_S)


def _check_equal(settings: Sequence[dict[str, object]]) -> None:
    """Refuse settings that differ from rank 0's."""
    for rank, of_rank in enumerate(settings):
        for name, value in settings[0].items():
            if of_rank[name] != value:
                raise LaunchError(
                    f"all ranks must launch with the same arguments: {name} is {value!r} on rank 0 and "
                    f"{of_rank[name]!r} on rank {rank}. Pass one value on every rank."
                )


def _as_text(entry: Entry) -> str:
    return json.dumps([entry.settings, entry.own, [entry.address, *RankProcess.own()]])


def _reply_key(number: int) -> str:
    return f"reply to request {number}"


def _entry_key(name: str, rank: int) -> str:
    return f"{name}/settings of rank {rank}"


def _decision_key(name: str) -> str:
    return f"{name}/decision"


def _processes_key(address: str, view: str) -> str:
    return f"processes of {address} {view}"


def _receipt_key(name: str) -> str:
    return f"{name}/receipts"


def _unreachable(address: StoreAddress, rank: int, timeout_s: float, error: Exception) -> LaunchError:
    at, reason = f"{address.host}:{address.port}", str(error).split("\n")[0].rstrip(".")
    if rank == 0 and not address.is_external:
        return LaunchError(f"rank 0 cannot listen on {at}: {reason}. Use a free port of this host, on every rank.")
    return LaunchError(
        f"rank {rank} could not reach {at} within {timeout_s:g} s: {reason}. Check that rank 0 runs, that every rank "
        "is given its address, and that no firewall is between them."
    )
