"""How the ranks of a job are spread over hosts."""

from hybridpp.cluster.gather_numbers import gather_numbers
from hybridpp.cluster.world import World
from hybridpp.errors import ConfigError


def ranks_per_host(world: World) -> int:
    """How many consecutive ranks each host has. Collective: all ranks of ``world``.

    Raises:
        ConfigError: hosts have different numbers of ranks, or those of one host are not consecutive.
    """
    local_ranks = [int(number) for (number,) in gather_numbers(world.control(), _CALL, [world.local_rank])]
    size = max(local_ranks) + 1
    if local_ranks != [rank % size for rank in range(world.size)] or world.size % size:
        raise ConfigError(
            f"hosts must have equal numbers of consecutive ranks: got the local ranks {_listed(local_ranks)}. Start as "
            "many processes on each host, numbered host by host, or say how many replicas with a number."
        )
    return size


_CALL = "finding out which ranks are on one host"


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:16])) + (", …" if len(numbers) > 16 else "")
