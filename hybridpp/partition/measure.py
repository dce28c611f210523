"""What a unit call costs."""

import time
from collections.abc import Callable, Mapping
from contextvars import copy_context
from typing import Any

import torch
from torch import nn

from hybridpp.errors import PartitionError
from hybridpp.partition.intercept import Forward, Interceptor
from hybridpp.partition.trace import Trace, UnitCall

_NUM_RUNS = 3


def by_flops(sizes: Mapping[str, int]) -> Callable[[UnitCall], float]:
    """FLOPs of the forward; parameters decide where there are none (an embedding)."""
    return lambda call: call.flops + sum(sizes[name] for name in call.parameters)


def by_parameters(sizes: Mapping[str, int]) -> Callable[[UnitCall], float]:
    """Number of parameter elements."""
    return lambda call: float(sum(sizes[name] for name in call.parameters))


def by_time(trace: Trace, seconds: list[float]) -> Callable[[UnitCall], float]:
    """Measured seconds, in the order of the trace's calls."""
    measured = {id(call): value for call, value in zip(trace.calls, seconds, strict=True)}
    return lambda call: measured[id(call)]


class _Stopwatch:
    """A unit handler that times every call."""

    def __init__(self, device: torch.device):
        self.seconds: list[float] = []
        self._device = device
        self._inside = False

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def __call__(self, name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside:
            return forward(*args, **kwargs)
        self._inside = True
        start = self._now()
        try:
            return forward(*args, **kwargs)
        finally:
            self.seconds.append(self._now() - start)
            self._inside = False


def measure_seconds(
    model: nn.Module, interceptor: Interceptor, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> list[float]:
    """Seconds of each unit call of ``model(*args, **kwargs)``, forward only, the least of some runs.

    The model is moved to the device whole. Buffers that a forward updates (running statistics) are put back.

    Raises:
        PartitionError: the model has no numbers yet.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise PartitionError("a model on the meta device cannot be timed. Use balance='flops'.")
    model.to(device)
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    runs = []
    for _ in range(_NUM_RUNS):
        stopwatch = _Stopwatch(device)
        with torch.no_grad(), interceptor.active(stopwatch):
            copy_context().run(model, *args, **kwargs)
        runs.append(stopwatch.seconds)
    for buffer, value in kept:
        buffer.copy_(value)
    return [min(times) for times in zip(*runs, strict=True)]
