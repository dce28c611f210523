"""Measure how fast the device is that this process computes on, and its links to the others of a job."""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from hybridpp.cluster import Group, World
from hybridpp.estimate.devices import DEVICES, DeviceProfile
from hybridpp.optim import HybridAdam

_FORMATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_REPEATS = 7
_GIB = 2**30
# Bytes of a message that shows the bandwidth, and of one that shows what a message takes.
_LARGE, _SMALL = 2**23, 2**10


def measure_device(device: torch.device) -> DeviceProfile:
    """Speeds of products, of memory and of operators on a device. Takes a few seconds.

    Links are not measured: they are those of an H100, or of a CPU. See :func:`measure_links`.

    Args:
        device: a CPU or a CUDA device.
    """
    is_cpu = device.type == "cpu"
    base = DEVICES["cpu" if is_cpu else "h100"]
    # Products in half precision have no kernels on many CPUs, and take a hundred times as long.
    sizes = {name: 8192 if not is_cpu else 512 if name == "fp32" else 128 for name in _FORMATS}
    products = {name: _product_s(sizes[name], one, device) for name, one in _FORMATS.items()}
    numbers = torch.zeros((2**24 if is_cpu else 2**28) // 4, device=device)
    copied_s = _seconds(lambda: numbers.add_(1.0), device)
    tiny = torch.zeros(8, device=device)
    op_s = _seconds(lambda: [tiny + tiny for _ in range(200)], device) / 200
    return replace(
        base,
        name="cpu" if is_cpu else torch.cuda.get_device_name(device),
        memory_gib=round(_memory_bytes(device) / _GIB, 2),
        tflops={name: 2 * sizes[name] ** 3 / seconds / 1e12 for name, seconds in products.items()},
        memory_gib_s=2 * numbers.nbytes / copied_s / _GIB,
        update_gib_s=_update_bytes_per_s(device) / _GIB,
        op_us=1e6 * op_s if is_cpu else base.op_us,
        host_us=0.0 if is_cpu else 1e6 * op_s,
        devices_per_host=base.devices_per_host if is_cpu else max(1, torch.cuda.device_count()),
        cores=len(os.sched_getaffinity(0)) if is_cpu and hasattr(os, "sched_getaffinity") else base.cores,
    )


def measure_links(profile: DeviceProfile, world: World) -> DeviceProfile:
    """The same with the speed of messages between the ranks of a job; on every rank the slowest one that any measured.

    On CPUs of one thread each it is the processor's time of a message, which is what it costs ranks of one host. The
    time that a network takes between CPUs of several hosts is in none of these numbers.

    Collective: all ranks of the world.

    Args:
        profile: of each rank's device.
        world: with two ranks or more.
    """
    group = world.split([range(world.size)], "profile", point_to_point=True)
    assert group is not None, "every rank is in it"
    large = _exchange_s(group, torch.zeros(_LARGE // 4, device=world.device), world.device)
    small = _exchange_s(group, torch.zeros(_SMALL // 4, device=world.device), world.device)
    sums = [_sum_s(group, torch.zeros(size // 4, device=world.device)) for size in (_LARGE, _SMALL)]
    slowest = [max(float(one) for one in column) for column in zip(*_shared(world, [large, small, *sums]), strict=True)]
    speed = _LARGE / max(slowest[0] - slowest[1], 1e-9) / _GIB
    sent = 2 * (_LARGE - _SMALL) * (world.size - 1) / world.size
    return replace(
        profile,
        host_gib_s=speed,
        message_us=1e6 * slowest[1],
        sum_gib_s=sent / max(slowest[2] - slowest[3], 1e-9) / _GIB,
        sum_us=1e6 * slowest[3],
    )


def _shared(world: World, numbers: list[float]) -> list[list[float]]:
    own = torch.tensor(numbers, dtype=torch.float64)
    return [part.tolist() for part in world.control().all_gather(own)]


def _sum_s(group: Group, tensor: Tensor) -> float:
    """Time of a sum over all ranks."""
    return _seconds(lambda: group.all_reduce(tensor).wait(), tensor.device)


def _exchange_s(group: Group, tensor: Tensor, device: torch.device) -> float:
    """Time in which each rank sends to the next one and receives from the one before."""
    incoming = torch.empty_like(tensor)

    def exchange() -> None:
        sent = group.send(tensor, (group.rank + 1) % group.size)
        group.receive(incoming, (group.rank - 1) % group.size).wait()
        sent.wait()

    return _seconds(exchange, device)


def _update_bytes_per_s(device: torch.device) -> float:
    """Of an update of Adam: gradients, two moments and weights, of which all but gradients are written, too."""
    count, size = (64, 2**15) if device.type == "cpu" else (64, 2**20)
    parameters = [torch.nn.Parameter(torch.zeros(size, device=device)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = HybridAdam(parameters, lr=0.0)
    # As update_ms counts: the state twice, the weights once.
    moved = count * size * 4 * (2 * 3 + 1)
    return moved / _seconds(optimizer.step, device)


def _product_s(size: int, dtype: torch.dtype, device: torch.device) -> float:
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    return _seconds(lambda: matrix @ matrix, device)


def _seconds(function: Callable[[], object], device: torch.device) -> float:
    """The median of several calls."""
    function()
    times, now = [], clock_of(device)
    for _ in range(_REPEATS):
        start = now()
        function()
        times.append(now() - start)
    return statistics.median(times)


def clock_of(device: torch.device) -> Callable[[], float]:
    """The clock that measures what a device computes, in seconds.

    On a CPU with one thread it is the time of the processor, so that it does not matter how many ranks, or other
    programs, share the cores: a simulation knows the cores.
    """

    def now() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    if device.type == "cuda":
        return now
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
