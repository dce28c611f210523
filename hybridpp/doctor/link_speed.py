"""How fast messages between ranks are, and how far the clocks of their hosts differ."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from hybridpp.cluster import Group, World, gather_numbers

_CALL = "in hybridpp doctor"
_PINGS, _REPEATS = 40, 3
# Of a message that shows the bandwidth: large enough that its latency does not count.
_CPU_BYTES, _DEVICE_BYTES = 2**23, 2**26
_MESSAGES = 4
_TRANSPORTS = ("shared memory", "gloo", "nccl", "in-process")
# With more ranks, not every pair is measured.
MAX_RANKS_OF_ALL_PAIRS = 16


class LinkSpeed(NamedTuple):
    """Messages between two ranks.

    Attributes:
        first, second: the ranks.
        latency_us: time of a small message, in microseconds: half of a round trip, the median of many.
        gb_s: bandwidth from the first to the second, in GB/s (1e9 bytes per second).
        gb_s_back: from the second to the first.
        transport: by which they travel.
    """

    first: int
    second: int
    latency_us: float
    gb_s: float
    gb_s_back: float
    transport: str


def measured_pairs(size: int) -> list[tuple[int, int]]:
    """The pairs of ranks that are measured: all, or with many ranks each with rank 0 and with the next one."""
    if size <= MAX_RANKS_OF_ALL_PAIRS:
        return list(combinations(range(size), 2))
    return sorted({(0, rank) for rank in range(1, size)} | {(rank, rank + 1) for rank in range(size - 1)})


def measure_pairs(world: World, hosts: Sequence[str]) -> list[LinkSpeed]:
    """The speed of messages between ranks, a pair at a time, on the device that each rank computes on.

    Ranks of one host use the group that they would have in a layout within the host.

    Collective: all ranks of the world.

    Args:
        world: the ranks.
        hosts: of each rank; equal: they are on one.

    Returns:
        Every pair of :func:`measured_pairs`, on every rank.
    """
    of_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        of_host.setdefault(host, []).append(rank)
    near = world.split(list(of_host.values()), "doctor within hosts", point_to_point=True)
    far = world.split([range(world.size)], "doctor", point_to_point=True)
    assert near is not None, "every rank is on a host"
    assert far is not None, "every rank is in it"
    large = torch.zeros((_CPU_BYTES if world.device.type == "cpu" else _DEVICE_BYTES) // 4, device=world.device)
    pairs = measured_pairs(world.size)
    numbers: list[float] = []
    for first, second in pairs:
        # One pair at a time: others would take its cores, or its link.
        world.control().all_gather(torch.zeros(1))
        if world.rank not in (first, second):
            continue
        group = near if hosts[first] == hosts[second] else far
        other = group.ranks.index(second if world.rank == first else first)
        if world.rank == first:
            numbers += [*_measure(group, other, large), _TRANSPORTS.index(group.transport)]
        else:
            _answer(group, other, large)
    rows = [iter(row) for row in gather_numbers(world.control(), _CALL, numbers)]
    world.release([near, far])
    return [_next_speed(pair, rows[pair[0]]) for pair in pairs]


def _next_speed(pair: tuple[int, int], numbers: Iterator[float]) -> LinkSpeed:
    latency_us, gb_s, gb_s_back, transport = (next(numbers) for _ in range(4))
    return LinkSpeed(*pair, latency_us, gb_s, gb_s_back, _TRANSPORTS[int(transport)])


def _measure(group: Group, other: int, large: Tensor) -> tuple[float, float, float]:
    """Latency and the bandwidths there and back, measured by this rank while the other one answers."""
    small = torch.zeros(2, device=large.device)

    def ping() -> None:
        _send(group, other, small)
        _receive(group, other, small)

    def there() -> None:
        for work in [group.send(large, other) for _ in range(_MESSAGES)]:
            work.wait()
        _receive(group, other, small)

    def back() -> None:
        _send(group, other, small)
        for _ in range(_MESSAGES):
            _receive(group, other, large)

    latency_s = _median_s(ping, _PINGS) / 2
    gigabytes = _MESSAGES * large.nbytes / 1e9
    there_s, back_s = (max(_median_s(each, _REPEATS) - latency_s, 1e-9) for each in (there, back))
    return 1e6 * latency_s, gigabytes / there_s, gigabytes / back_s


def _answer(group: Group, other: int, large: Tensor) -> None:
    """What the other rank of a pair does meanwhile; as many times, with one that is not counted."""
    small = torch.zeros(2, device=large.device)
    for _ in range(1 + _PINGS):
        _receive(group, other, small)
        _send(group, other, small)
    for _ in range(1 + _REPEATS):
        for _ in range(_MESSAGES):
            _receive(group, other, large)
        _send(group, other, small)
    for _ in range(1 + _REPEATS):
        _receive(group, other, small)
        for work in [group.send(large, other) for _ in range(_MESSAGES)]:
            work.wait()
        _wait_for(large.device)


def _wall_clock() -> float:
    return time.time()


def _send(group: Group, other: int, tensor: Tensor) -> None:
    group.send(tensor, other).wait()
    _wait_for(tensor.device)


def _receive(group: Group, other: int, tensor: Tensor) -> None:
    group.receive(tensor, other).wait()
    _wait_for(tensor.device)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _median_s(function: Callable[[], None], repeats: int) -> float:
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def clock_offsets(world: World) -> list[float]:
    """How far each rank's clock is ahead of that of rank 0, in seconds, to half a round trip.

    Collective: all ranks of the world.
    """
    offsets, control = [], world.control()
    for _ in range(5):
        start = time.perf_counter()
        sent = control.all_gather(torch.tensor([_wall_clock()], dtype=torch.float64))
        offsets.append((time.perf_counter() - start, [float(one) - float(sent[0]) for one in sent]))
    # In the quickest exchange, the ranks sent at nearly the same time.
    return min(offsets)[1]
