"""Launch: join a job as its launcher or the caller says. The only file that reads the environment."""

import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hybridpp.cluster.child_processes import keep_sockets_in
from hybridpp.cluster.exit_reports import ExitReports
from hybridpp.cluster.failure_hook import FailureHook, FailureOptions
from hybridpp.cluster.failure_text import FULL_TRACEBACK
from hybridpp.cluster.join import TIMEOUT_S, JoinOptions, ProcessRank, check_timeout, join_job
from hybridpp.cluster.launcher_notes import LAUNCHER, LauncherNotes
from hybridpp.cluster.own_variables import OwnVariables
from hybridpp.cluster.rank_process import RankProcess
from hybridpp.cluster.rendezvous import StoreAddress
from hybridpp.cluster.seeds import set_seed
from hybridpp.cluster.starters import OPENMPI, SLURM, TORCHRUN, starter_of
from hybridpp.cluster.stop_request import STOP_SIGNALS
from hybridpp.cluster.watchdog_limits import WatchdogLimits
from hybridpp.cluster.world import override
from hybridpp.errors import ConfigError, LaunchError, shown

_SHARED_MEMORY = "HYBRIDPP_SHARED_MEMORY"
_NOTES = "HYBRIDPP_NOTES"
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_RUN_ID = "TORCHELASTIC_RUN_ID"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# What changes how a job runs, see environment_of_jobs.
_PREFIXES = ("GLOO_", "NCCL_", "TORCH_NCCL_", "OMP_", "MKL_", "KMP_", "HYBRIDPP_", "CUDA_VISIBLE", "PYTORCH_")
_OTHERS = ("GLIBC_TUNABLES", "LD_PRELOAD", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "no_proxy")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_OWN = OwnVariables(os.environ)


def launch_from_torch(
    config: dict[str, Any] | None = None,
    backend: str | None = None,
    seed: int = 1024,
    timeout_s: float = TIMEOUT_S,
    stop_signals: Sequence[str] = STOP_SIGNALS,
    watchdog_s: float | Mapping[str, float] | None = None,
) -> None:
    """Join the job that ``torchrun`` started, with the ranks and addresses it left in the environment.

    A job that torchrun starts again (``--max-restarts``) joins anew. From now on, an error that ends ranks is printed
    by one of them. A process that no launcher started (``python script.py``, a notebook) is a job of one rank; there,
    a second call seeds again, and changes nothing else.

    Collective: every process of the job must call it, once, with the same arguments.

    Args:
        config: accepted for scripts that pass ``{}``; settings are passed to the plugin.
        backend: ``"nccl"`` or ``"gloo"``; None takes nccl where every rank has a CUDA device of its own, else gloo
            (device memory then travels through host memory, and rank 0 warns).
        seed: of Python's, numpy's and torch's generators, the same on every rank.
        timeout_s: time limit in seconds for waiting for another rank, here and in every communication of the job. Raise
            it if one rank works alone for longer while others wait (downloads the data set, or writes to a slow disk).
        stop_signals: names of the signals that set ``booster.interrupted``, from the first step on; handlers of the
            script are called, too. ``()``: none does.
        watchdog_s: after so many seconds without progress in a step or in reading a batch, one rank reports who waits
            for whom, the first suspect and its Python stack, and all ranks end with exit code 75. A dict has a limit
            for each section: ``{"step": 60, "data": 300, "setup": 3600, "save": 3600, "script": 300}``. Where the
            script keeps a rank for as long as a step may take, that is only told. None: nobody watches.

    Raises:
        LaunchError: another launcher started the process, or variables of torchrun are missing; or ranks did not join
            in time, or have other arguments.
        ConfigError: ``config`` holds settings, the backend is unknown or cannot work here, or a number is out of range.
    """
    alone = _is_alone()
    if not alone:
        _require(TORCHRUN, "launch_from_torch", "torchrun", _what_to_call_instead())
    if config:
        raise ConfigError(
            f"launch_from_torch takes no settings: got config with {', '.join(map(repr, config))}. "
            "Pass them to HybridParallelPlugin."
        )
    if alone and dist.is_initialized() and dist.get_world_size() == 1:  # the cell of a notebook, run again
        set_seed(seed)
        return
    if alone:
        any_port = StoreAddress("127.0.0.1", 0)
        _join(any_port, ProcessRank(0, 1, 0), backend, seed, timeout_s, stop_signals, watchdog_s)
        return
    rank, world_size, local_rank = (_number(name) for name in TORCHRUN[:3])
    # The agent may be the one that listens there; torch's own rendezvous asks the same variable.
    is_external = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = StoreAddress(os.environ["MASTER_ADDR"], _number("MASTER_PORT"), is_external)
    _join(address, ProcessRank(rank, world_size, local_rank), backend, seed, timeout_s, stop_signals, watchdog_s)


def launch_from_slurm(
    host: str,
    port: int,
    *,
    backend: str | None = None,
    seed: int = 1024,
    timeout_s: float = TIMEOUT_S,
    stop_signals: Sequence[str] = STOP_SIGNALS,
    watchdog_s: float | Mapping[str, float] | None = None,
) -> None:
    """Join the job that ``srun`` started, one process per task.

    Collective: every process of the job must call it, once, with the same arguments.

    Args:
        host: address of the host of rank 0, for instance the first of ``scontrol show hostnames``.
        port: a free port there.
        backend, seed, timeout_s, stop_signals, watchdog_s: as in :func:`launch_from_torch`.

    Raises:
        LaunchError: the process was not started by srun; or ranks did not come in time, or with other arguments.
        ConfigError: the backend is unknown or cannot work here, or a number is out of range.
    """
    _require(SLURM, "launch_from_slurm", "srun", "Start the script with: srun python your_script.py")
    rank, world_size, local_rank = map(_number, SLURM)
    process = ProcessRank(rank, world_size, local_rank)
    _join(StoreAddress(host, _port(port)), process, backend, seed, timeout_s, stop_signals, watchdog_s)


def launch_from_openmpi(
    host: str,
    port: int,
    *,
    backend: str | None = None,
    seed: int = 1024,
    timeout_s: float = TIMEOUT_S,
    stop_signals: Sequence[str] = STOP_SIGNALS,
    watchdog_s: float | Mapping[str, float] | None = None,
) -> None:
    """Join the job that Open MPI's ``mpirun`` started.

    Collective: every process of the job must call it, once, with the same arguments.

    Args:
        host: address of the host of rank 0.
        port: a free port there.
        backend, seed, timeout_s, stop_signals, watchdog_s: as in :func:`launch_from_torch`.

    Raises:
        LaunchError: the process was not started by mpirun; or ranks did not come in time, or with other arguments.
        ConfigError: the backend is unknown or cannot work here, or a number is out of range.
    """
    _require(OPENMPI, "launch_from_openmpi", "mpirun", "Start the script with: mpirun -n 4 python your_script.py")
    rank, world_size, local_rank = map(_number, OPENMPI)
    process = ProcessRank(rank, world_size, local_rank)
    _join(StoreAddress(host, _port(port)), process, backend, seed, timeout_s, stop_signals, watchdog_s)


def launch(
    rank: int,
    world_size: int,
    host: str,
    port: int,
    *,
    backend: str | None = None,
    local_rank: int | None = None,
    seed: int = 1024,
    timeout_s: float = TIMEOUT_S,
    stop_signals: Sequence[str] = STOP_SIGNALS,
    watchdog_s: float | Mapping[str, float] | None = None,
) -> None:
    """Join a job whose ranks and address the caller knows.

    Collective: every process of the job must call it, once; rank 0 listens on ``host:port``.

    Args:
        rank: this process, 0 to ``world_size - 1``.
        world_size: number of processes.
        host: address of rank 0.
        port: free port there.
        backend: as in :func:`launch_from_torch`.
        local_rank: this process among those of its host; None means all are on one host. It chooses the CUDA device
            where the process sees several.
        seed, timeout_s, stop_signals, watchdog_s: as in :func:`launch_from_torch`.

    Raises:
        ConfigError: the backend is unknown or cannot work here, or a number is out of range.
        LaunchError: a job is already joined; or ranks did not come in time, or with other arguments.
    """
    local_rank = rank if local_rank is None else local_rank
    process = ProcessRank(rank, world_size, local_rank)
    _join(StoreAddress(host, _port(port)), process, backend, seed, timeout_s, stop_signals, watchdog_s)


def check_joined() -> None:
    """Refuse to continue as a single rank in a process that was started as one of several.

    Raises:
        LaunchError: with what to call.
    """
    if override.get() is not None or dist.is_initialized():
        return
    starter = starter_of(os.environ)
    if starter is not None and _number(starter.size) > 1:
        raise LaunchError(
            f"{starter.name} started this process as one of {os.environ[starter.size]}, and it has not joined the "
            f"others. Call hybridpp.{starter.call} first."
        )


def join_as_started(address: str | None, timeout_s: float = TIMEOUT_S) -> None:
    """Join the job in which this process was started, whichever launcher did it; for commands, which are no scripts.

    A process that has joined, or that is alone, stays as it is.

    Collective: every process of the job must call it, once, with the same arguments.

    Args:
        address: ``host:port`` (``[host]:port``) where the ranks meet, on the host of rank 0; torchrun's processes need
            none.
        timeout_s: as in :func:`launch_from_torch`.

    Raises:
        LaunchError: the address is missing, or is none; or ranks did not come in time.
    """
    starter = None if dist.is_initialized() else starter_of(os.environ)
    if starter is None or _number(starter.size) <= 1:
        return
    if starter.variables[: len(TORCHRUN)] == TORCHRUN:
        launch_from_torch(timeout_s=timeout_s)
        return
    host, _, port = (address or "").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")  # of an IPv6 address
    if not host or not port.isdecimal():
        raise LaunchError(
            f"{starter.name} started this process as one of {os.environ[starter.size]}, which meet at an address: got "
            f"{shown(address)}. Pass --address HOST:PORT, with the host of rank 0 and a free port there."
        )
    if starter.variables == OPENMPI:
        launch_from_openmpi(host, int(port), timeout_s=timeout_s)
    elif starter.variables[: len(SLURM)] == SLURM:
        launch_from_slurm(host, int(port), timeout_s=timeout_s)
    else:
        local_rank = _number("MPI_LOCALRANKID") if "MPI_LOCALRANKID" in os.environ else None
        rank, world_size = _number("PMI_RANK"), _number("PMI_SIZE")
        launch(rank, world_size, host, int(port), local_rank=local_rank, timeout_s=timeout_s)


def environment_of_jobs() -> dict[str, str]:
    """The variables that change how a job runs, without those that joining it has set.

    Of proxies only that they are set, because values may be secret.
    """
    found = {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES) or name in _OTHERS}
    found = {name: value for name, value in found.items() if name not in (_NOTES, LAUNCHER) and not _OWN.has(name)}
    return found | {name.lower(): "set" for name in os.environ if name.lower() in _PROXIES}


def local_rank_of(rank: int, world_size: int) -> int:
    """This process among those of its host, in a job that the script joined by itself.

    Args:
        rank: of this process in the job.
        world_size: number of processes of the job.

    Returns:
        What torchrun, mpirun or srun left in the environment; ``rank`` where none of them started the job, as if all
        its processes were on one host.

    Raises:
        LaunchError: a variable is no number.
    """
    if TORCHRUN[2] in os.environ:
        return _number(TORCHRUN[2])
    for own, size, local in (OPENMPI, (SLURM[0], "SLURM_STEP_NUM_TASKS", SLURM[2])):
        # Processes that another launcher started inside of such a job inherit the numbers of their parent.
        is_set = all(name in os.environ for name in (own, size, local))
        if is_set and (_number(own), _number(size)) == (rank, world_size):
            return _number(local)
    return rank


def shared_memory_wanted() -> bool:
    """Whether ranks of one host may communicate through shared memory; not if ``HYBRIDPP_SHARED_MEMORY`` is 0.

    Raises:
        ConfigError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(_SHARED_MEMORY, "1")
    if value not in ("0", "1"):
        raise ConfigError(
            f"{_SHARED_MEMORY} is 0 or 1: got {shown(value)}. Use 0 for gloo between ranks of one host, or unset it."
        )
    return value == "1"


def set_up_launcher(notes: Path, *, several_hosts: bool) -> bool:
    """Set what torchrun and the ranks that it starts find in the environment; what the user has set stays.

    Args:
        notes: folder for what ranks tell their launcher.
        several_hosts: of the job. Torch's launchers would keep the store of an attempt for the next one, in which
            another host may be the first: the ranks would look for each other in two stores.

    Returns:
        Whether the user wants to see torchrun's own log.
    """
    os.environ[_NOTES] = str(notes)
    os.environ[LAUNCHER] = json.dumps(RankProcess.own())
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Where the rank that hosts the store has ended, each call of the others would print its native stack.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if several_hosts:
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    return "LOGLEVEL" in os.environ


def _join(
    address: StoreAddress,
    process: ProcessRank,
    backend: str | None,
    seed: int,
    timeout_s: float,
    stop_signals: Sequence[str],
    watchdog_s: float | Mapping[str, float] | None,
) -> None:
    check_timeout(timeout_s)
    limits = None if watchdog_s is None else WatchdogLimits.of(watchdog_s, timeout_s)
    if limits is not None:
        # NCCL's flight recorder, from which the report takes what is under way; read when groups are made.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    keep_sockets_in(_path_in(_NOTES))
    notes = LauncherNotes(_path_in(_NOTES), process.local_rank)
    failures = _failure_hook(process)
    notes.launched()
    options = JoinOptions(
        backend=backend,
        seed=seed,
        timeout_s=timeout_s,
        shared_memory=shared_memory_wanted(),
        stop_signals=stop_signals,
        notes=notes,
        failures=failures,
        limits=limits,
        launcher=_launcher(),
        # Read by every group that is made.
        take_interface=partial(_OWN.set, _GLOO_INTERFACE),
        drop_interface=_OWN.drop,
    )
    join_job(address, process, options)


def _launcher() -> RankProcess | None:
    """The process that looks after this rank: `hybridpp run`, or the agent of torchrun or of what uses it.

    mpirun and srun end their processes by themselves; and a shell may end when its user goes.
    """
    if os.environ.get(LAUNCHER):
        return RankProcess(*json.loads(os.environ[LAUNCHER]))
    if _RUN_ID not in os.environ:
        return None
    # A script may be started by one that the agent has started.
    return RankProcess.ancestor_without({name: os.environ[name] for name in (_RUN_ID, *TORCHRUN) if name in os.environ})


def _failure_hook(process: ProcessRank) -> FailureHook:
    """Let one rank print an error that ends several, from the launch on."""
    error_file = _path_in(_ERROR_FILE) if _RUN_ID in os.environ else None
    # One folder per attempt, which the ranks of this host share: attempt_0/LOCAL_RANK/error.json.
    folder = None if error_file is None else error_file.parents[1]
    options = FailureOptions(os.environ.get(FULL_TRACEBACK, "0") not in ("", "0"), error_file)
    hook = FailureHook(ExitReports(None, process.rank, folder), process.world_size, options)
    hook.install()
    return hook


def _path_in(name: str) -> Path | None:
    return Path(os.environ[name]) if os.environ.get(name) else None


def _port(port: int) -> int:
    if not 0 < port < 2**16:
        raise ConfigError(f"port is 1 to 65535: got {port}. Use a free one of rank 0's host, the same on every rank.")
    return port


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise LaunchError(f"{name} is a number: got {shown(os.environ[name])}. Leave it as it was set.") from None


def _require(names: tuple[str, ...], function: str, starter: str, way_out: str) -> None:
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise LaunchError(
            f"{function} needs the environment of {starter}: {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set. {way_out}"
        )


def _is_alone() -> bool:
    """Whether no launcher has started this process, or only this one."""
    if any(name in os.environ for name in TORCHRUN[:3]) or starter_of(os.environ) is not None:
        return False
    # In the script of a batch job of several tasks, srun was forgotten.
    return os.environ.get(SLURM[1], "1") == "1" or not all(name in os.environ for name in SLURM)


def _what_to_call_instead() -> str:
    for names, starter in ((OPENMPI, "openmpi"), (SLURM, "slurm")):
        if all(name in os.environ for name in names):
            return (
                f"{names[0]} is set: call hybridpp.launch_from_{starter}(host, port), with the address of rank 0, "
                "or start the script with torchrun."
            )
    return (
        "Start the script with: torchrun --standalone --nproc-per-node 4 your_script.py; or call "
        "hybridpp.launch(rank, world_size, host, port) in processes of your own."
    )
