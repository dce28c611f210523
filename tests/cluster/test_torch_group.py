"""Device memory over a backend that only knows host memory; the CPU plays the device."""

import torch
from processes import run_ranks

from hybridpp.cluster import current_world


def _exchange():
    world = current_world()
    group = world.split([[0, 1]])
    group._staged = lambda tensor: True
    other = 1 - group.rank
    mine = torch.full((3,), float(group.rank + 1))
    theirs = torch.zeros(3)
    receiving = group.receive(theirs, other)
    group.send(mine, other).wait()
    receiving.wait()
    total = mine.clone()
    work = group.all_reduce(total)
    work.wait()
    assert group.all_gather_along(mine, 0).tolist() == [1.0] * 3 + [2.0] * 3
    assert group.reduce_scatter(torch.arange(4.0), 0).tolist() == [[0.0, 2.0], [4.0, 6.0]][group.rank]
    return theirs.tolist(), total.tolist(), [part.tolist() for part in group.all_gather(mine)]


def test_what_arrives_on_the_host_is_copied_to_the_device():
    ones, twos = [1.0] * 3, [2.0] * 3
    assert run_ranks(_exchange, 2) == [(twos, [3.0] * 3, [ones, twos]), (ones, [3.0] * 3, [ones, twos])]
