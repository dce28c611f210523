"""Costs of unit calls."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from hybridpp.cluster import preserved_random_state
from hybridpp.errors import PartitionError
from hybridpp.module_adapter import Forward
from hybridpp.nn import walk
from hybridpp.nn.snapshot import preserved_modules
from hybridpp.partition.calls import Trace, UnitCall
from hybridpp.partition.intercept import Interceptor

_NUM_RUNS = 3


def unit_costs(
    model: nn.Module, trace: Trace, balance: str, seconds: Callable[[], Sequence[float]]
) -> Callable[[UnitCall], float]:
    """The cost of each call of the trace, which is balanced over the stages.

    Args:
        model: the complete model.
        trace: with FLOPs if ``balance`` is ``"flops"``.
        balance: ``"flops"`` of the forward, with parameters where there are none (an embedding); ``"parameters"``; or
            ``"time"``.
        seconds: measures the calls, in the trace's order; called for ``"time"`` only, when the first cost is needed.
    """
    if balance == "time":

        @functools.cache
        def measured() -> dict[int, float]:
            # Only when a cost is needed: if the user requests a cut, nothing is timed.
            return {id(call): value for call, value in zip(trace.calls, seconds(), strict=True)}

        return lambda call: measured()[id(call)]
    sizes = {name: parameter.numel() for name, parameter in walk.named_parameters(model)}
    counts_flops = balance == "flops"
    # Integers: floats would let rounding decide between equally good cuts, and Python's versions sum them differently.
    return lambda call: (call.flops if counts_flops else 0) + sum(sizes[name] for name in call.parameters)


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
    model: nn.Module,
    interceptor: Interceptor,
    sample: tuple[tuple[Any, ...], dict[str, Any]],
    device: torch.device,
    dtypes: Mapping[int, torch.dtype],
) -> list[float]:
    """Seconds of each unit call of the model's forward, the minimum of several runs.

    The model is not changed, on whatever device its tensors are.

    Args:
        model: the complete model; it must fit on ``device``.
        interceptor: of its units.
        sample: positional and keyword arguments, on ``device``.
        device: to measure.
        dtypes: of tensors that will be cast, by ``id``.

    Raises:
        PartitionError: the model is on the meta device.
    """
    named = (*walk.named_parameters(model), *walk.named_buffers(model))
    if any(tensor.is_meta for _, tensor in named):
        raise PartitionError("a model on the meta device cannot be timed. Use balance='flops' or 'parameters'.")
    args, kwargs = sample
    runs = []
    for _ in range(_NUM_RUNS):
        stopwatch = _Stopwatch(device)
        # Copies of buffers: a forward may update them (running statistics).
        tensors = {name: leaf.to(device, dtypes.get(id(leaf), leaf.dtype)) for name, leaf in named}
        tensors |= {name: tensors[name].clone() for name, _ in walk.named_buffers(model)}
        with (
            preserved_modules(model),
            preserved_random_state(device),
            interceptor.active(stopwatch),
            torch.no_grad(),
        ):
            copy_context().run(functional_call, model, tensors, args, kwargs)
        runs.append(stopwatch.seconds)
    return [min(times) for times in zip(*runs, strict=True)]
