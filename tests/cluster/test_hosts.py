import re

import pytest

from hybridpp.cluster import Loopback, current_world, ranks_per_host
from hybridpp.errors import ConfigError


def on_hosts(local_ranks):
    def run():
        world = current_world()
        world.local_rank = local_ranks[world.rank]
        return ranks_per_host(world)

    return Loopback(len(local_ranks)).run(run)


@pytest.mark.parametrize(("local_ranks", "size"), [([0], 1), ([0, 1], 2), ([0, 0, 0], 1), ([0, 1, 2, 0, 1, 2], 3)])
def test_equal_hosts(local_ranks, size):
    assert on_hosts(local_ranks) == [size] * len(local_ranks)


@pytest.mark.parametrize("local_ranks", [[0, 1, 0], [0, 0, 1, 1], [1, 0], [0, 1, 0, 0]])
def test_other_hosts_are_refused(local_ranks):
    text = (
        f"hosts must have equal numbers of consecutive ranks: got the local ranks {', '.join(map(str, local_ranks))}. "
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}Start as many processes on each host"):
        on_hosts(local_ranks)
