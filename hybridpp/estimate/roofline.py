"""Times of a run's operators, from what they compute and move."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

import torch

from hybridpp.estimate.devices import DeviceProfile
from hybridpp.estimate.model_run import ModelRun
from hybridpp.estimate.op_log import Op
from hybridpp.estimate.unit_times import UnitTimes

_FORMATS = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_PASSES = {"all_reduce": 2}


def roofline(run: ModelRun, device: DeviceProfile, tp_size: int = 1, key: str = "") -> UnitTimes:
    """When each unit would run on a device.

    An operator takes as long as its products, or as what it moves, whichever is longer. The device waits for the host
    where that takes longer for all operators of a pass.

    Args:
        run: of the model.
        device: its speeds.
        tp_size: ranks that take part in the run's communication.
        key: of the result.
    """
    return _times(run, run.ops, device, tp_size, key)


def with_sums(measured: UnitTimes, run: ModelRun, device: DeviceProfile, tp_size: int) -> UnitTimes:
    """Times that were measured on one rank alone, with those of its communication with the ranks that share layers.

    Args:
        measured: of the run's units.
        run: of the model.
        device: its speeds.
        tp_size: ranks that take part.
    """
    messages = [op for op in run.ops if op.message]
    if not messages:
        return measured
    added = _times(run, messages, replace(device, host_us=0.0), tp_size, measured.key)
    return UnitTimes(
        key=measured.key,
        names=measured.names,
        begins=tuple(map(sum, zip(measured.begins, added.begins, strict=True))),
        ends=tuple(map(sum, zip(measured.ends, added.ends, strict=True))),
        gradients=tuple(
            None if own is None or other is None else own + other
            for own, other in zip(measured.gradients, added.gradients, strict=True)
        ),
        loss=measured.loss + added.loss,
        backward_end=measured.backward_end + added.backward_end,
        end=measured.end + added.end,
    )


def _times(run: ModelRun, ops: Sequence[Op], device: DeviceProfile, tp_size: int, key: str) -> UnitTimes:
    clock = _Clock([op.event for op in ops], [_device_s(op, device, tp_size) for op in ops], device.host_us * 1e-6)
    return UnitTimes(
        key=key,
        names=tuple(call.name for call in run.calls),
        begins=tuple(clock.at(call.begin) for call in run.calls),
        ends=tuple(clock.at(call.end) for call in run.calls),
        gradients=tuple(None if call.gradient is None else clock.at(call.gradient) for call in run.calls),
        loss=clock.at(run.loss),
        backward_end=clock.at(run.backward_end),
        end=clock.at(run.end),
    )


def _device_s(op: Op, device: DeviceProfile, tp_size: int) -> float:
    if op.message:
        # A ring: each rank sends its share once, or twice.
        size = _PASSES.get(op.message, 1) * op.num_bytes * (tp_size - 1) / tp_size
        return device.sum_s(size, tp_size - 1)
    precision = "fp32" if op.dtype is None else _FORMATS.get(op.dtype, "fp32")
    products = op.flops / device.flops_per_s(precision)
    return max(products, op.num_bytes / (device.memory_gib_s * 2**30)) + device.op_us * 1e-6


class _Clock:
    """The time of each event: that of the device, or of the host, whichever is later."""

    def __init__(self, events: list[int], device_s: list[float], host_s: float):
        self._events: list[int] = []
        self._times: list[float] = []
        computed = issued = 0.0
        for event, duration in zip(events, device_s, strict=True):
            issued += host_s
            # It starts when it has been issued, and the one before has ended.
            computed = max(computed, issued) + duration
            self._events.append(event)
            self._times.append(computed)

    def at(self, event: int) -> float:
        """When everything had run that came before an event."""
        index = bisect_right(self._events, event)
        return self._times[index - 1] if index else 0.0
