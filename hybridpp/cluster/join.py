"""Join the processes of a job: wait for all, connect, seed, and let the others know when this one ends."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hybridpp.cluster.devices import RankDevice, choose_backend, device_for, identify, warning_about
from hybridpp.cluster.failure_hook import FailureHook
from hybridpp.cluster.host_address import address_between_hosts, address_towards, interface_with
from hybridpp.cluster.launcher_notes import LauncherNotes
from hybridpp.cluster.process_watch import ProcessWatch
from hybridpp.cluster.progress import Progress
from hybridpp.cluster.rank_process import RankProcess
from hybridpp.cluster.rendezvous import Entry, StoreAddress, peers_of_host, wait_for_ranks
from hybridpp.cluster.seeds import set_seed
from hybridpp.cluster.stop_request import STOP_SIGNALS, StopRequest
from hybridpp.cluster.torch_world import connected, job_world
from hybridpp.cluster.watchdog_limits import WatchdogLimits
from hybridpp.errors import ConfigError, LaunchError, text_of
from hybridpp.nn.torch_private import Store

# NCCL's default. Ranks work in step, so only work that one rank does alone takes longer.
TIMEOUT_S = 600.0
_MAX_TIMEOUT_S = 1e9
# Not the distributed logger, which needs the world that is created here.
_LOGGER = logging.getLogger("hybridpp")


class ProcessRank(NamedTuple):
    """Ranks of a process in its job and on its host."""

    rank: int
    world_size: int
    local_rank: int


@dataclass(frozen=True, kw_only=True)
class JoinOptions:
    """How a process joins a job.

    Attributes:
        backend: ``"nccl"``, ``"gloo"`` or None, as in :func:`~hybridpp.cluster.launch.launch_from_torch`.
        seed: of all generators.
        timeout_s: time limit in seconds for waiting for another rank.
        shared_memory: whether ranks of one host may communicate through shared memory.
        stop_signals: names of the signals that tell the job to stop.
        notes: for the launcher.
        failures: prints the error that ends this rank; None: nothing does it but Python.
        limits: of the watchdog; None: there is none.
        launcher: the process that started this rank, and looks after it; None: none does, or nobody knows which.
        take_interface: lets gloo use the network interface of this name, unless the user chose one; returns its choice.
        drop_interface: takes that back, when the process leaves the job.
    """

    backend: str | None = None
    seed: int = 1024
    timeout_s: float = TIMEOUT_S
    shared_memory: bool = True
    stop_signals: Sequence[str] = STOP_SIGNALS
    notes: LauncherNotes = field(default_factory=LauncherNotes)
    failures: FailureHook | None = None
    limits: WatchdogLimits | None = None
    launcher: RankProcess | None = None
    take_interface: Callable[[str], str] = lambda name: name
    drop_interface: Callable[[], None] = lambda: None


def join_job(address: StoreAddress, process: ProcessRank, options: JoinOptions) -> None:
    """Join a job.

    Collective: every process of the job must call it, once, with the same arguments but for ``process``.

    Args:
        address: where the processes meet.
        process: this one.
        options: the same on all ranks.

    Raises:
        LaunchError: a job is already joined; or ranks did not come in time, or with other arguments.
        ConfigError: the backend is unknown or cannot work here, or a number is out of range.
    """
    _check_backend(options.backend)
    _check_numbers(process)
    check_timeout(options.timeout_s)
    stop = StopRequest(options.stop_signals, options.notes)
    if dist.is_initialized():
        raise LaunchError(
            "this process has already joined a job. Call launch or launch_from_torch once; where another library has "
            "joined it (Ray Train's TorchTrainer, an Accelerator), call neither."
        )
    device = device_for(process.local_rank)
    if device is not None:
        torch.cuda.set_device(device)
    progress = Progress()
    watch = ProcessWatch(progress, stop, options.failures, options.launcher)
    try:
        with progress.connecting():
            store, chosen = _connect(address, process, options, device, watch)
            world = job_world(options.shared_memory, process.local_rank, progress)
            world.control()
    except BaseException:
        watch.stop()
        raise
    options.notes.clear()
    world.stop = stop
    watchdog = None if options.limits is None else world.watch(options.limits, store)
    # From now on, ranks may leave the job.
    world.watch_processes(watch, store_ends_with_rank_0=not address.is_external)
    if watchdog is not None:
        watchdog.start()
    world.failures, world.left = options.failures, options.drop_interface
    if options.failures is not None:
        options.failures.joined(world.exit_reports, stop, progress, world.tell_end)
    set_seed(options.seed)
    _LOGGER.debug("[rank %d] joined %d ranks over %s", process.rank, process.world_size, chosen)


def _connect(
    address: StoreAddress,
    process: ProcessRank,
    options: JoinOptions,
    device: torch.device | None,
    watch: ProcessWatch,
) -> tuple[Store, str]:
    """Meet all ranks, and make the default group; the store of this attempt, and the backend."""
    rank, world_size, timeout_s = process.rank, process.world_size, options.timeout_s
    alike: dict[str, object] = {"world_size": world_size, "backend": options.backend, "seed": options.seed}
    alike |= {"timeout_s": timeout_s, "watchdog_s": None if options.limits is None else options.limits.as_text()}
    reached_from = address_towards(address.host)
    entry = Entry(
        settings=alike,
        own=[identify(device), reached_from],
        address=reached_from,
        decide=lambda own: _decide(options.backend, own),
    )
    store, (chosen, addresses) = wait_for_ranks(address, rank, world_size, entry, timeout_s)
    watch.start(peers_of_host(store, rank, reached_from))
    interface = interface_with(address_between_hosts(reached_from, addresses))
    interface = options.take_interface(interface) if interface else ""
    timeout = timedelta(seconds=timeout_s)
    try:
        connected(
            lambda: dist.init_process_group(chosen, store=store, rank=rank, world_size=world_size, timeout=timeout),
            timeout,
        )
    except RuntimeError as error:
        options.drop_interface()
        raise LaunchError(
            f"rank {rank} met the {world_size} ranks of the job, and could not connect to them"
            f"{f' (over its network interface {interface})' if interface else ''}: {text_of(error)}. One of them "
            "may have ended since, or a firewall may be between them; GLOO_SOCKET_IFNAME chooses another interface."
        ) from error
    return store, chosen


def _check_numbers(process: ProcessRank) -> None:
    if not 0 <= process.rank < process.world_size:
        raise ConfigError(
            f"rank is 0 to world_size - 1: got rank={process.rank}, world_size={process.world_size}. Number "
            "the processes from 0, each differently."
        )


def check_timeout(timeout_s: float) -> None:
    """Refuse what is no time limit.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s <= _MAX_TIMEOUT_S:
        raise ConfigError(
            f"timeout_s is a number of seconds above 0, at most {_MAX_TIMEOUT_S:g}: got {timeout_s!r}. Use "
            f"{TIMEOUT_S:g}, or 86400 for a day."
        )


def _check_backend(asked: str | None) -> None:
    if asked not in (None, "nccl", "gloo"):
        raise ConfigError(f"backend is one of nccl, gloo: got {asked!r}.")
    if asked == "nccl" and not dist.is_nccl_available():
        raise ConfigError(
            "this build of torch has no NCCL. Use backend='gloo', or install torch for CUDA from pytorch.org."
        )


def _decide(asked: str | None, of_ranks: Sequence[Any]) -> tuple[str, list[str]]:
    """The backend, and the addresses from which the ranks reach the store."""
    devices, addresses = zip(*of_ranks, strict=True)
    return _choose(asked, devices), list(addresses)


def _choose(asked: str | None, own: Sequence[Any]) -> str:
    """Choose the backend for all ranks, on rank 0; ``own`` are their devices."""
    devices = [RankDevice(*one) for one in own]
    backend = choose_backend(asked, devices)
    warning = warning_about(backend, asked, devices)
    if warning:
        _LOGGER.warning("[rank 0] %s", warning)
    return backend
