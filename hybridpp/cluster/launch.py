"""Launch: join the processes of a job. The only file that reads the environment."""

import logging
import os
import re
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hybridpp.cluster.exit_reports import report_exit
from hybridpp.cluster.rendezvous import StoreAddress, meet
from hybridpp.cluster.seeds import set_seed
from hybridpp.cluster.torch_world import job_world
from hybridpp.cluster.world import override
from hybridpp.errors import ConfigError, LaunchError

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
_OPENMPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
# What processes have that a launcher started as one of several, and what they call. The script of a batch job is no
# step of SLURM's, though the job has several tasks.
_STARTERS = (
    ("torchrun", _TORCHRUN, "WORLD_SIZE", "launch_from_torch()"),
    ("mpirun", _OPENMPI, "OMPI_COMM_WORLD_SIZE", "launch_from_openmpi(host, port)"),
    ("srun", (*_SLURM, "SLURM_STEP_NUM_TASKS"), "SLURM_STEP_NUM_TASKS", "launch_from_slurm(host, port)"),
)
_SHARED_MEMORY = "HYBRIDPP_SHARED_MEMORY"
# NCCL's default. Ranks work in step, so only work that one rank does alone takes longer.
_TIMEOUT_S = 600.0
_MAX_TIMEOUT_S = 1e9
# Not the distributed logger, which needs the world that is created here.
_LOGGER = logging.getLogger("hybridpp")


class _ProcessRank(NamedTuple):
    """Ranks of a process in its job and on its host."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def launch_from_torch(
    config: dict[str, Any] | None = None,
    backend: str | None = None,
    seed: int = 1024,
    timeout_s: float = _TIMEOUT_S,
) -> None:
    """Join the job that ``torchrun`` started, with the ranks and addresses it left in the environment.

    A job that torchrun starts again (``--max-restarts``) joins anew.

    Collective: every process of the job must call it, once, with the same arguments.

    Args:
        config: accepted for scripts that pass ``{}``; settings are passed to the plugin.
        backend: ``"nccl"`` or ``"gloo"``; None takes nccl where every process of this host has a CUDA device of its
            own, else gloo (device memory then travels through host memory).
        seed: of Python's, numpy's and torch's generators, the same on every rank.
        timeout_s: time limit in seconds for waiting for another rank, here and in every communication of the job. Raise
            it if one rank works alone for longer while others wait (downloads the data set, or writes to a slow disk).

    Raises:
        LaunchError: the process was not started by torchrun; or ranks did not join in time, or have other arguments.
        ConfigError: ``config`` holds settings, the backend is unknown or cannot work here, or a number is out of range.
    """
    missing = [name for name in _TORCHRUN if name not in os.environ]
    if missing:
        raise LaunchError(
            f"launch_from_torch needs the environment of torchrun: {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set. {_what_to_call_instead()}"
        )
    if config:
        raise ConfigError(
            f"launch_from_torch takes no settings: got config with {', '.join(map(repr, config))}. "
            "Pass them to HybridParallelPlugin."
        )
    rank, world_size, local_rank = (_number(name) for name in _TORCHRUN[:3])
    local_world_size = _number("LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in os.environ else world_size
    # The agent may be the one that listens there; torch's own rendezvous asks the same variable.
    is_external = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = StoreAddress(os.environ["MASTER_ADDR"], _number("MASTER_PORT"), is_external)
    _join(address, _ProcessRank(rank, world_size, local_rank, local_world_size), backend, seed, timeout_s)


def launch_from_slurm(
    host: str, port: int, *, backend: str | None = None, seed: int = 1024, timeout_s: float = _TIMEOUT_S
) -> None:
    """Join the job that ``srun`` started, one process per task.

    Collective: every process of the job must call it, once, with the same arguments.

    Args:
        host: address of the host of rank 0, for instance the first of ``scontrol show hostnames``.
        port: a free port there.
        backend, seed, timeout_s: as in :func:`launch_from_torch`.

    Raises:
        LaunchError: the process was not started by srun; or ranks did not come in time, or with other arguments.
        ConfigError: the backend is unknown or cannot work here, or a number is out of range.
    """
    _require(_SLURM, "launch_from_slurm", "srun python your_script.py")
    rank, world_size, local_rank = map(_number, _SLURM)
    # "4(x2),3": of this host alone there is no number. All hosts must agree, and the largest rules out most.
    tasks = re.findall(r"(\d+)(?:\(x\d+\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", str(world_size)))
    process = _ProcessRank(rank, world_size, local_rank, max(map(int, tasks)))
    _join(StoreAddress(host, _port(port)), process, backend, seed, timeout_s)


def launch_from_openmpi(
    host: str, port: int, *, backend: str | None = None, seed: int = 1024, timeout_s: float = _TIMEOUT_S
) -> None:
    """Join the job that Open MPI's ``mpirun`` started.

    Collective: every process of the job must call it, once, with the same arguments.

    Args:
        host: address of the host of rank 0.
        port: a free port there.
        backend, seed, timeout_s: as in :func:`launch_from_torch`.

    Raises:
        LaunchError: the process was not started by mpirun; or ranks did not come in time, or with other arguments.
        ConfigError: the backend is unknown or cannot work here, or a number is out of range.
    """
    _require(_OPENMPI, "launch_from_openmpi", "mpirun -n 4 python your_script.py")
    rank, world_size, local_rank = map(_number, _OPENMPI)
    local = "OMPI_COMM_WORLD_LOCAL_SIZE"
    process = _ProcessRank(rank, world_size, local_rank, _number(local) if local in os.environ else world_size)
    _join(StoreAddress(host, _port(port)), process, backend, seed, timeout_s)


def launch(
    rank: int,
    world_size: int,
    host: str,
    port: int,
    *,
    backend: str | None = None,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    seed: int = 1024,
    timeout_s: float = _TIMEOUT_S,
) -> None:
    """Join a job whose ranks and address the caller knows.

    Collective: every process of the job must call it, once; rank 0 listens on ``host:port``.

    Args:
        rank: this process, 0 to ``world_size - 1``.
        world_size: number of processes.
        host: address of rank 0.
        port: free port there.
        backend: as in :func:`launch_from_torch`.
        local_rank: this process among those of its host; None means all are on one host.
        local_world_size: number of processes on this host; None means all.
        seed, timeout_s: as in :func:`launch_from_torch`.

    Raises:
        ConfigError: the backend is unknown or cannot work here, or a number is out of range.
        LaunchError: a job is already joined; or ranks did not come in time, or with other arguments.
    """
    local_rank = rank if local_rank is None else local_rank
    local_world_size = world_size if local_world_size is None else local_world_size
    process = _ProcessRank(rank, world_size, local_rank, local_world_size)
    _join(StoreAddress(host, _port(port)), process, backend, seed, timeout_s)


def check_joined() -> None:
    """Refuse to continue as a single rank in a process that was started as one of several.

    Raises:
        LaunchError: with what to call.
    """
    if override.get() is not None or dist.is_initialized():
        return
    for starter, names, size, call in _STARTERS:
        if all(name in os.environ for name in names) and _number(size) > 1:
            raise LaunchError(
                f"{starter} started this process as one of {os.environ[size]}, and it has not joined the others. Call "
                f"hybridpp.{call} first."
            )


def shared_memory_wanted() -> bool:
    """Whether ranks of one host may communicate through shared memory; not if ``HYBRIDPP_SHARED_MEMORY`` is 0.

    Raises:
        ConfigError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(_SHARED_MEMORY, "1")
    if value not in ("0", "1"):
        raise ConfigError(
            f"{_SHARED_MEMORY} is 0 or 1: got {value!r}. Use 0 for gloo between ranks of one host, or unset it."
        )
    return value == "1"


def _join(address: StoreAddress, process: _ProcessRank, backend: str | None, seed: int, timeout_s: float) -> None:
    backend = _backend(backend, process.local_world_size)
    shared_memory = shared_memory_wanted()
    _check_numbers(process, timeout_s)
    if dist.is_initialized():
        raise LaunchError("this process has already joined a job. Call launch or launch_from_torch once.")
    rank, world_size = process.rank, process.world_size
    if torch.cuda.is_available():
        torch.cuda.set_device(process.local_rank % torch.cuda.device_count())
    alike = {"world_size": world_size, "backend": backend, "seed": seed, "timeout_s": timeout_s}
    store = meet(address, rank, world_size, alike, timeout_s)
    timeout = timedelta(seconds=timeout_s)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    except RuntimeError as error:
        raise LaunchError(
            f"rank {rank} met the {world_size} ranks of the job, and could not connect to them: {error}. One of them "
            "may have ended since, or a firewall or a host name that is not known may be between them."
        ) from error
    world = job_world(shared_memory)
    # From now on, ranks that wait for a rank notice its end.
    world.control()
    world.stop_exit_report = report_exit(world.exit_reports)
    set_seed(seed)
    _LOGGER.debug("[rank %d] joined %d ranks over %s", rank, world_size, backend)


def _check_numbers(process: _ProcessRank, timeout_s: float) -> None:
    if not 0 <= process.rank < process.world_size:
        raise ConfigError(
            f"rank is 0 to world_size - 1: got rank={process.rank}, world_size={process.world_size}. Number "
            "the processes from 0, each differently."
        )
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s <= _MAX_TIMEOUT_S:
        raise ConfigError(
            f"timeout_s is a number of seconds above 0, at most {_MAX_TIMEOUT_S:g}: got {timeout_s!r}. Use "
            f"{_TIMEOUT_S:g}, or 86400 for a day."
        )


def _port(port: int) -> int:
    if not 0 < port < 2**16:
        raise ConfigError(f"port is 1 to 65535: got {port}. Use a free one of rank 0's host, the same on every rank.")
    return port


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise LaunchError(f"{name} is a number: got {os.environ[name]!r}. Leave it as it was set.") from None


def _require(names: tuple[str, ...], function: str, command: str) -> None:
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise LaunchError(
            f"{function} needs the environment of {command.split()[0]}: {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set. Start the script with: {command}"
        )


def _what_to_call_instead() -> str:
    for names, starter in ((_OPENMPI, "openmpi"), (_SLURM, "slurm")):
        if all(name in os.environ for name in names):
            return (
                f"{names[0]} is set: call hybridpp.launch_from_{starter}(host, port), with the address of rank 0, "
                "or start the script with torchrun."
            )
    return (
        "Start the script with: torchrun --standalone --nproc-per-node 4 your_script.py; or call "
        "hybridpp.launch(rank, world_size, host, port) in processes of your own."
    )


def _backend(asked: str | None, local_world_size: int) -> str:
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked is None:
        return "nccl" if num_devices >= local_world_size else "gloo"
    if asked not in ("nccl", "gloo"):
        raise ConfigError(f"backend is one of nccl, gloo: got {asked!r}.")
    if asked == "nccl" and num_devices < local_world_size:
        raise ConfigError(
            f"nccl needs a CUDA device for every process of a host: got {local_world_size} processes, "
            f"{num_devices} devices. Use backend='gloo', or fewer processes."
        )
    return asked
