"""Ranks, groups, launch, logging and seeds."""

from hybridpp.cluster.child_processes import EndWithRank, kill_at_exit
from hybridpp.cluster.common_results import CommonResults, ResultStores
from hybridpp.cluster.coordinator import DistCoordinator
from hybridpp.cluster.current import current_world
from hybridpp.cluster.dist_logger import disable_existing_loggers, get_dist_logger
from hybridpp.cluster.gather_numbers import PendingNumbers, gather_numbers, name_ranks, start_gather_numbers
from hybridpp.cluster.gather_objects import gather_objects
from hybridpp.cluster.generators import check_generator_states, generator_states, set_generator_states
from hybridpp.cluster.grid import Axis, Coordinate, RankGrid
from hybridpp.cluster.host_copy import HostCopy
from hybridpp.cluster.hosts import ranks_per_host
from hybridpp.cluster.launch import (
    check_joined,
    environment_of_jobs,
    join_as_started,
    launch,
    launch_from_openmpi,
    launch_from_slurm,
    launch_from_torch,
)
from hybridpp.cluster.launcher_notes import LauncherNotes
from hybridpp.cluster.loopback import Loopback
from hybridpp.cluster.pending import Mapped
from hybridpp.cluster.progress import Awaited, DeviceWork, Progress, Section
from hybridpp.cluster.random_draws import DrawMonitor, default_generators, has_drawn
from hybridpp.cluster.seeds import (
    RandomState,
    microbatch_key,
    preserved_random_state,
    random_state,
    seed_stream,
    set_random_state,
    set_seed,
    stream_seed,
    stream_seeder,
)
from hybridpp.cluster.stop_request import StopRequest
from hybridpp.cluster.wire_format import as_carried, resolved
from hybridpp.cluster.world import Group, Patience, Pending, Work, World

__all__ = [
    "Awaited",
    "Axis",
    "CommonResults",
    "Coordinate",
    "DeviceWork",
    "DistCoordinator",
    "DrawMonitor",
    "EndWithRank",
    "Group",
    "HostCopy",
    "LauncherNotes",
    "Loopback",
    "Mapped",
    "Patience",
    "Pending",
    "PendingNumbers",
    "Progress",
    "RandomState",
    "RankGrid",
    "ResultStores",
    "Section",
    "StopRequest",
    "Work",
    "World",
    "as_carried",
    "check_generator_states",
    "check_joined",
    "current_world",
    "default_generators",
    "disable_existing_loggers",
    "environment_of_jobs",
    "gather_numbers",
    "gather_objects",
    "generator_states",
    "get_dist_logger",
    "has_drawn",
    "join_as_started",
    "kill_at_exit",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
    "microbatch_key",
    "name_ranks",
    "preserved_random_state",
    "random_state",
    "ranks_per_host",
    "resolved",
    "seed_stream",
    "set_generator_states",
    "set_random_state",
    "set_seed",
    "start_gather_numbers",
    "stream_seed",
    "stream_seeder",
]
