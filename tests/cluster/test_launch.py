import os
import random
import re
import socket

import numpy
import pytest
import torch
import torch.distributed as dist
from processes import run_ranks

from hybridpp import DistCoordinator, launch, launch_from_torch
from hybridpp.errors import ConfigError, LaunchError

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture
def environment(monkeypatch):
    """Sets what torchrun leaves; None removes a variable."""

    def change(**changes):
        for name, value in {**TORCHRUN, **changes}.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    return change


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        (list(TORCHRUN), "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT are"),
        (["LOCAL_RANK"], "LOCAL_RANK is"),
    ],
)
def test_without_torchrun_the_message_shows_its_command(environment, missing, named):
    environment(**dict.fromkeys(missing))
    text = (
        f"launch_from_torch needs the environment of torchrun: {named} not set. "
        "Start the script with: torchrun --standalone --nproc-per-node 4 your_script.py"
    )
    with pytest.raises(LaunchError, match=f"^{re.escape(text)}$"):
        launch_from_torch()


def test_settings_in_the_config_are_refused(environment):
    environment()
    text = "launch_from_torch takes no settings: got config with 'fp16', 'zero'. Pass them to HybridParallelPlugin."
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}$"):
        launch_from_torch({"fp16": {}, "zero": {}})


def test_unknown_backend(environment):
    environment()
    text = "^backend is one of nccl, gloo: got 'mpi'\\.$"
    with pytest.raises(ConfigError, match=text):
        launch_from_torch(backend="mpi")
    with pytest.raises(ConfigError, match=text):
        launch(0, 1, "127.0.0.1", 1, backend="mpi")


def test_nccl_needs_a_device_for_every_process_of_the_host(environment):
    devices = torch.cuda.device_count()
    text = (
        f"nccl needs a CUDA device for every process of a host: got 1000 processes, {devices} devices. "
        "Use backend='gloo', or fewer processes."
    )
    environment(WORLD_SIZE="4000", LOCAL_WORLD_SIZE="1000")
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}$"):
        launch_from_torch(backend="nccl")
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}$"):
        launch(0, 4000, "127.0.0.1", 1, backend="nccl", local_world_size=1000)
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}$"):
        launch(0, 1000, "127.0.0.1", 1, backend="nccl")


def drawn():
    return random.random(), float(numpy.random.rand()), torch.rand(1).item()


def test_ranks_join_once_with_the_backend_asked_for_and_the_same_seeds():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])

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
        os.environ.update(TORCHRUN, RANK=str(rank), LOCAL_RANK=str(rank), MASTER_PORT=port)
        launch_from_torch({}, backend="gloo", seed=7)
        return [*seen, dist.get_backend(), (dist.get_rank(), dist.get_world_size()) == (rank, 2), drawn()]

    first, second = run_ranks(run, 2)
    assert first == second
    backend, by_launch, text, again, same_place, by_torchrun = first
    assert (backend, again, same_place) == ("gloo", "gloo", True)
    assert text == "this process has already joined a job. Call launch or launch_from_torch once."
    random.seed(7), numpy.random.seed(7)
    assert by_torchrun == (random.random(), float(numpy.random.rand()), torch.rand(1, generator=seeded(7)).item())
    assert by_launch[2] == torch.rand(1, generator=seeded(1024)).item()


def seeded(seed):
    return torch.Generator().manual_seed(seed)
