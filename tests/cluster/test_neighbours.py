import socket
import threading

import pytest
import torch
import torch.distributed as dist
from processes import run_ranks

from hybridpp.cluster import current_world, neighbours


def _sums():
    world = current_world()
    group = world.split([list(range(world.size))])
    assert not group.overlaps, "what goes through shared memory, the rank carries itself"
    generator = torch.Generator().manual_seed(group.rank)
    sums = []
    for size in (1, 1000, 70_000):
        part = torch.randn(size, generator=generator)
        parts = torch.stack(group.all_gather(part))
        mine = group.reduce_scatter(parts, 0)
        group.all_reduce(part).wait()
        # From the first rank to the last, everywhere.
        assert torch.equal(part, (parts[0] + parts[1]) + parts[2])
        torch.testing.assert_close(mine[0], parts[group.rank] * 3)
        sums.append(part)
    return sums


def test_three_ranks_sum_to_the_same_bits():
    first, *others = run_ranks(_sums, 3)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def _without(monkeypatch_on: int, name: str):
    if dist.get_rank() == monkeypatch_on:
        setattr(neighbours, name, lambda *args: None)
    told = []
    neighbours._LOGGER.debug = lambda message, ranks: told.append(message % (ranks,))
    group = current_world().split([[0, 1]])
    assert told == ["ranks [0, 1] share no memory (one x86 host with Linux is wanted): they use gloo"]
    total, received = torch.tensor([group.rank + 1.0]), torch.zeros(2)
    group.all_reduce(total).wait()
    works = [group.receive(received, 1 - group.rank), group.send(torch.full((2,), float(group.rank)), 1 - group.rank)]
    for work in works:
        work.wait()
    return group.overlaps, total.item(), received.tolist(), group.reduce_scatter(torch.ones(2), 0).item()


@pytest.mark.parametrize("name", ["_listen", "_call"])
def test_if_one_rank_cannot_all_use_gloo(name):
    assert run_ranks(lambda: _without(1, name), 2) == [(True, 3.0, [1.0, 1.0], 2.0), (True, 3.0, [0.0, 0.0], 2.0)]


def test_nobody_listens_under_a_name_of_another_host():
    assert neighbours._call((b"\0hybridpp-elsewhere", b"token"), 1) is None


def test_who_does_not_know_the_token_is_turned_away():
    listener = neighbours._listen()
    address, token = listener.getsockname(), bytes(16)
    strangers = [neighbours._call((address, bytes(15)), 1), neighbours._call((address, bytes(range(16))), 1)]
    strangers[0].shutdown(socket.SHUT_WR)
    caller = neighbours._call((address, token), 2)
    answers = {}
    thread = threading.Thread(target=lambda: answers.update(neighbours._answer(listener, token, 1, 5.0)))
    thread.start()
    thread.join(10)
    assert list(answers) == [2]
    for connection in (*answers.values(), *strangers, caller):
        connection.close()
