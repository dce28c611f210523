"""The current world."""

import torch.distributed as dist

from hybridpp.cluster.launch import local_rank_of, shared_memory_wanted
from hybridpp.cluster.loopback import Loopback, LoopbackWorld
from hybridpp.cluster.torch_world import job_world
from hybridpp.cluster.world import World, override


def current_world() -> World:
    """The in-process world if one is running, else the job of ``torch.distributed``, else a world of one rank.

    A script that joined no job computes where a rank of a job would: on a CUDA device if there is one.
    """
    world = override.get()
    if world is not None:
        return world
    if dist.is_initialized():
        return job_world(shared_memory_wanted(), local_rank_of(dist.get_rank(), dist.get_world_size()))
    return LoopbackWorld(Loopback(1), 0, device=None)
