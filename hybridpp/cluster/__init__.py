"""Ranks, groups, launch, logging and seeds."""

from hybridpp.cluster.coordinator import DistCoordinator
from hybridpp.cluster.current import current_world
from hybridpp.cluster.dist_logger import disable_existing_loggers, get_dist_logger
from hybridpp.cluster.grid import Axis, Coordinate, RankGrid
from hybridpp.cluster.launch import launch, launch_from_torch
from hybridpp.cluster.loopback import Loopback
from hybridpp.cluster.seeds import (
    RandomState,
    microbatch_key,
    place_seed,
    place_seeder,
    preserved_random_state,
    random_state,
    seed_place,
    set_random_state,
    set_seed,
)
from hybridpp.cluster.world import Group, Pending, Work, World

__all__ = [
    "Axis",
    "Coordinate",
    "DistCoordinator",
    "Group",
    "Loopback",
    "Pending",
    "RandomState",
    "RankGrid",
    "Work",
    "World",
    "current_world",
    "disable_existing_loggers",
    "get_dist_logger",
    "launch",
    "launch_from_torch",
    "microbatch_key",
    "place_seed",
    "place_seeder",
    "preserved_random_state",
    "random_state",
    "seed_place",
    "set_random_state",
    "set_seed",
]
