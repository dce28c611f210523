import math
import os
import re

import pytest
import torch
import torch.distributed as dist
from processes import free_port, run_forked, run_ranks

from hybridpp import (
    DistCoordinator,
    HybridParallelPlugin,
    launch,
    launch_from_openmpi,
    launch_from_slurm,
    launch_from_torch,
)
from hybridpp.cluster import Loopback, current_world
from hybridpp.cluster.launch import join_as_started, local_rank_of
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
        (["RANK", "LOCAL_RANK", "MASTER_PORT"], "RANK, LOCAL_RANK, MASTER_PORT are"),
        (["LOCAL_RANK"], "LOCAL_RANK is"),
    ],
)
def test_without_all_of_torchruns_variables_the_message_shows_its_command(environment, missing, named):
    environment(**dict.fromkeys(missing))
    text = (
        f"launch_from_torch needs the environment of torchrun: {named} not set. "
        "Start the script with: torchrun --standalone --nproc-per-node 4 your_script.py; or call "
        "hybridpp.launch(rank, world_size, host, port) in processes of your own."
    )
    with pytest.raises(LaunchError, match=f"^{re.escape(text)}$"):
        launch_from_torch()


def test_a_process_that_nothing_started_is_a_job_of_one():
    # In a child of its own, because it joins: a script with no launcher, or a notebook.
    def run():
        for name in NO_LAUNCHER:
            os.environ.pop(name, None)
        seen = []
        for seed in (1, 1, 2):
            launch_from_torch(seed=seed, backend="gloo")
            world = current_world()
            seen.append((world.rank, world.size, dist.is_initialized(), torch.rand(1).item()))
            DistCoordinator().block_all()
        DistCoordinator().destroy()
        return seen

    first, again, other = run_forked(run)
    assert first[:3] == (0, 1, True)
    assert first == again
    assert other[3] != first[3]


def test_the_script_of_a_batch_job_of_several_tasks_is_not_alone(environment):
    environment(**NO_LAUNCHER | {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"})
    with pytest.raises(LaunchError, match=r"SLURM_PROCID is set: call hybridpp\.launch_from_slurm"):
        launch_from_torch()


@pytest.mark.parametrize(
    ("starter", "variables"),
    [
        ("slurm", {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"}),
        (
            "openmpi",
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
        ),
    ],
)
def test_under_another_starter_the_message_names_its_launch(environment, starter, variables):
    environment(**dict.fromkeys(TORCHRUN) | variables)
    text = f"{next(iter(variables))} is set: call hybridpp.launch_from_{starter}(host, port), with the address"
    with pytest.raises(LaunchError, match=re.escape(text)):
        launch_from_torch()


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (
            launch_from_slurm,
            "SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID are not set. Start the script with: srun",
        ),
        (launch_from_openmpi, "OMPI_COMM_WORLD_LOCAL_RANK are not set. Start the script with: mpirun -n 4 python"),
    ],
)
def test_without_its_starter_a_launch_shows_the_command(function, text):
    with pytest.raises(LaunchError, match=re.escape(text)):
        function("127.0.0.1", 1)


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, 1e10, "60", True, None])
def test_a_timeout_is_a_positive_number_of_seconds(environment, value):
    environment()
    text = f"timeout_s is a number of seconds above 0, at most 1e+09: got {value!r}. Use 600, or 86400 for a day."
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}$"):
        launch_from_torch(timeout_s=value, backend="gloo")
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}$"):
        launch(0, 1, "127.0.0.1", 1, timeout_s=value, backend="gloo")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((2, 2, "127.0.0.1", 1), "rank is 0 to world_size - 1: got rank=2, world_size=2."),
        ((-1, 2, "127.0.0.1", 1), "rank is 0 to world_size - 1: got rank=-1, world_size=2."),
        ((0, 2, "127.0.0.1", 0), "port is 1 to 65535: got 0."),
        ((0, 2, "127.0.0.1", 70000), "port is 1 to 65535: got 70000."),
    ],
)
def test_places_and_ports_that_there_are_not(arguments, text):
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}"):
        launch(*arguments, backend="gloo")


def test_a_variable_that_is_no_number_is_named(environment):
    environment(RANK="one")
    with pytest.raises(LaunchError, match=r"^RANK is a number: got 'one'\."):
        launch_from_torch()


STARTED = {
    "accelerate launch": (TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "no"}, "launch_from_torch()"),
    "mpiexec": ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "launch(rank, world_size, host, port)"),
    "torchrun": (TORCHRUN, "launch_from_torch()"),
    "mpirun": (
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
        "launch_from_openmpi(host, port)",
    ),
    "srun": (
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2"},
        "launch_from_slurm(host, port)",
    ),
}


NO_LAUNCHER = dict.fromkeys([*TORCHRUN, *(name for variables, _ in STARTED.values() for name in variables)])


@pytest.mark.parametrize("starter", STARTED)
def test_a_forgotten_launch_is_refused_by_plugin_and_coordinator(environment, starter):
    variables, call = STARTED[starter]
    without = NO_LAUNCHER
    environment(**without | variables)
    text = f"{starter} started this process as one of 2, and it has not joined the others. Call hybridpp.{call} first."
    for construct in (lambda: HybridParallelPlugin(tp_size=1, pp_size=1, num_microbatches=1), DistCoordinator):
        with pytest.raises(LaunchError, match=f"^{re.escape(text)}$"):
            construct()
    # In-process ranks need no launch, nor does a job of one, nor the script of a batch job.
    assert Loopback(2).run(lambda: DistCoordinator().rank) == [0, 1]
    size = next(name for name in reversed(variables) if variables[name] == "2")
    environment(**without | variables | {size: None if starter == "srun" else "1"})
    assert DistCoordinator().rank == 0


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


@pytest.mark.parametrize("value", ["no", "2", ""])
def test_a_wrong_value_for_shared_memory_is_refused_before_joining(environment, value):
    environment(HYBRIDPP_SHARED_MEMORY=value)
    text = f"HYBRIDPP_SHARED_MEMORY is 0 or 1: got {value!r}. Use 0 for gloo between ranks of one host, or unset it."
    for join in (lambda: launch_from_torch(backend="gloo"), lambda: launch(0, 2, "127.0.0.1", 1, backend="gloo")):
        with pytest.raises(ConfigError, match=f"^{re.escape(text)}$"):
            join()


def test_consecutive_jobs_can_use_one_address_with_every_launcher():
    port = free_port()

    def run():
        rank, seen = str(dist.get_rank()), []
        # As on hosts of one task each, and on hosts with two tasks of another job before these.
        os.environ |= {"SLURM_PROCID": rank, "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
        names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
        os.environ |= dict(zip(names, (rank, "2", str(int(rank) + 2)), strict=True))
        for start in (launch_from_slurm, launch_from_openmpi, launch_from_slurm):
            DistCoordinator().destroy()
            start("127.0.0.1", port, timeout_s=20)
            total = torch.tensor([dist.get_rank() + 1.0])
            current_world().split([[0, 1]]).all_reduce(total).wait()
            seen.append((total.item(), DistCoordinator().local_rank))
        return seen

    assert run_ranks(run, 2) == [[(3.0, 0), (3.0, rank + 2), (3.0, 0)] for rank in range(2)]


SRUN = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}


@pytest.mark.parametrize(
    ("variables", "local_rank"),
    [
        ({}, 5),
        ({"LOCAL_RANK": "3"}, 3),
        (SRUN, 1),
        (MPIRUN, 2),
        # mpirun in the script of a batch job, and torchrun as srun's only task on each host.
        ({**SRUN, "SLURM_PROCID": "0", **MPIRUN}, 2),
        ({**SRUN, "LOCAL_RANK": "3"}, 3),
        # Processes that the script started by itself inside of a step or of an mpirun.
        ({**SRUN, "SLURM_PROCID": "1"}, 5),
        ({**MPIRUN, "OMPI_COMM_WORLD_SIZE": "4"}, 5),
    ],
)
def test_the_local_rank_in_a_job_of_the_scripts_own(environment, variables, local_rank):
    environment(**NO_LAUNCHER | variables)
    assert local_rank_of(5, 8) == local_rank


def test_a_local_rank_that_is_no_number_is_refused(environment):
    environment(**NO_LAUNCHER | SRUN | {"SLURM_LOCALID": "first"})
    with pytest.raises(LaunchError, match=r"^SLURM_LOCALID is a number: got 'first'\."):
        local_rank_of(5, 8)


@pytest.mark.parametrize(("address", "host"), [("host0:29500", "host0"), ("[fd00::1]:29500", "fd00::1")])
def test_an_address_may_be_of_ipv6(environment, monkeypatch, address, host):
    given = []
    launch = "launch_from_openmpi"
    monkeypatch.setitem(join_as_started.__globals__, launch, lambda *where, **_: given.append(where))
    environment(**NO_LAUNCHER | STARTED["mpirun"][0])
    join_as_started(address)
    assert given == [(host, 29500)]


@pytest.mark.parametrize("starter", ["mpirun", "mpiexec", "srun"])
def test_a_command_joins_the_job_that_it_was_started_in(starter):
    variables = STARTED[starter][0] | ({"SLURM_NTASKS": "2"} if starter == "srun" else {})
    address = f"127.0.0.1:{free_port()}"

    def run():
        rank = str(dist.get_rank())
        DistCoordinator().destroy()
        for name in NO_LAUNCHER:
            os.environ.pop(name, None)
        join_as_started(address, 20)  # alone: nothing is joined
        alone = current_world().size
        os.environ.update({name: rank if value == "0" else value for name, value in variables.items()})
        join_as_started(address, 20)
        return alone, current_world().size, current_world().rank

    assert run_ranks(run, 2) == [(1, 2, 0), (1, 2, 1)]
