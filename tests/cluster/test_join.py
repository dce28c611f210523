"""Processes join a job together, once at a time, with the same seed, backend and time limit."""

import os
import random

import numpy
import torch
import torch.distributed as dist
from processes import free_port, run_ranks

from hybridpp import DistCoordinator, launch, launch_from_torch
from hybridpp.cluster import current_world
from hybridpp.cluster.torch_group import timeout_of
from hybridpp.errors import LaunchError


def drawn():
    return random.random(), float(numpy.random.rand()), torch.rand(1).item()


def test_ranks_join_once_with_the_backend_asked_for_and_the_same_seeds():
    port = str(free_port())

    def run():
        rank, first = dist.get_rank(), drawn()
        seen = [dist.get_backend(), first]
        try:
            launch(rank, 2, "127.0.0.1", 1, backend="gloo")
        except LaunchError as error:
            seen.append(str(error))
        # Leave, and join again the other way.
        DistCoordinator().destroy()
        assert not dist.is_initialized()
        os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        launch_from_torch({}, backend="gloo", seed=7)
        return [*seen, dist.get_backend(), (dist.get_rank(), dist.get_world_size()) == (rank, 2), drawn()]

    first, second = run_ranks(run, 2)
    assert first == second
    backend, by_launch, text, again, same_place, by_torchrun = first
    assert (backend, again, same_place) == ("gloo", "gloo", True)
    assert text.startswith(
        "this process has already joined a job. Call launch or launch_from_torch once; where another"
    )
    random.seed(7), numpy.random.seed(7)
    assert by_torchrun == (random.random(), float(numpy.random.rand()), torch.rand(1, generator=seeded(7)).item())
    assert by_launch[2] == torch.rand(1, generator=seeded(1024)).item()


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def test_every_group_gives_up_after_the_timeout_of_the_launch():
    port = free_port()

    def run():
        rank = dist.get_rank()
        DistCoordinator().destroy()
        launch(rank, 2, "127.0.0.1", port, backend="gloo", timeout_s=7.5)
        world = current_world()
        world.split([[0, 1]], "pair"), world.split([[0], [1]])
        return [timeout_of(group).total_seconds() for group in dist.distributed_c10d._world.pg_map]

    assert run_ranks(run, 2) == [[7.5] * 3] * 2
