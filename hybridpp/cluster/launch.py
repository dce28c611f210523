"""Bring the processes of a job together. The only file that reads the environment."""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hybridpp.cluster.dist_logger import get_dist_logger
from hybridpp.cluster.seeds import set_seed
from hybridpp.errors import ConfigError, LaunchError

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_TIMEOUT_S = 600.0


def launch_from_torch(config: dict[str, Any] | None = None, backend: str | None = None, seed: int = 1024) -> None:
    """Join the job that ``torchrun`` started, with the ranks and addresses it left in the environment.

    Collective: every process of the job must call it, once.

    Args:
        config: accepted for scripts that pass ``{}``; settings belong to the plugin.
        backend: ``"nccl"`` or ``"gloo"``; None takes nccl where every process of this host has a CUDA device of its
            own, else gloo (device memory then travels through host memory).
        seed: of Python's, numpy's and torch's generators, the same on every rank.

    Raises:
        LaunchError: the process was not started by torchrun.
        ConfigError: ``config`` holds settings, or the backend is unknown or cannot work here.
    """
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise LaunchError(
            f"launch_from_torch needs the environment of torchrun: {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set. "
            "Start the script with: torchrun --standalone --nproc-per-node 4 your_script.py"
        )
    if config:
        raise ConfigError(
            f"launch_from_torch takes no settings: got config with {', '.join(map(repr, config))}. "
            "Pass them to HybridParallelPlugin."
        )
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, local_world_size = int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    # env:// and not tcp://, because torchrun's agent may already be listening on that port itself.
    _join("env://", rank, world_size, _backend(backend, local_world_size), local_rank, _TIMEOUT_S)
    set_seed(seed)


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
        seed: as in :func:`launch_from_torch`.
        timeout_s: seconds after which a communication that does not end is an error.

    Raises:
        ConfigError: the backend is unknown or cannot work here.
        LaunchError: a job is already joined.
    """
    chosen = _backend(backend, world_size if local_world_size is None else local_world_size)
    local_rank = rank if local_rank is None else local_rank
    _join(f"tcp://{host}:{port}", rank, world_size, chosen, local_rank, timeout_s)
    set_seed(seed)


def _join(init_method: str, rank: int, world_size: int, backend: str, local_rank: int, timeout_s: float) -> None:
    if dist.is_initialized():
        raise LaunchError("this process has already joined a job. Call launch or launch_from_torch once.")
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    dist.init_process_group(
        backend,
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    get_dist_logger().debug(f"joined {world_size} ranks over {backend}")


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
