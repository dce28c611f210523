"""Times of a run's operators, from what they compute and move."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

import torch

from hybridpp.estimate.devices import DeviceProfile
from hybridpp.estimate.model_run import ModelRun
from hybridpp.estimate.op_log import POINTWISE, WAIT, Op
from hybridpp.estimate.unit_times import UnitTimes

_FORMATS = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_PASSES = {"all_reduce": 2}


def roofline(run: ModelRun, device: DeviceProfile, tp_size: int = 1, key: str = "") -> UnitTimes:
    """When each unit would run on a device.

    An operator takes as long as its products, or as what it moves, whichever is longer. The device waits for the host
    where that takes longer for all operators of a pass. Communication proceeds beside operators until the rank waits
    for it; on CPUs it is the work of the cores.

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
    clock = _Clock(device)
    for op in ops:
        clock.run(op, _message_s(op, device, tp_size) if op.message else _device_s(op, device))
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


def _message_s(op: Op, device: DeviceProfile, tp_size: int) -> float:
    if op.message == WAIT:
        return 0.0
    # A ring: each rank sends its share once, or twice.
    size = _PASSES.get(op.message, 1) * op.num_bytes * (tp_size - 1) / tp_size
    return device.sum_s(size, tp_size - 1)


def _device_s(op: Op, device: DeviceProfile) -> float:
    if op.kernel == POINTWISE and POINTWISE in device.kernels:
        return op.joined_bytes / (device.kernels[POINTWISE] * 2**30) + _begin_us(op, device, device.op_us) * 1e-6
    precision = "fp32" if op.dtype is None else _FORMATS.get(op.dtype, "fp32")
    speed = device.flops_per_s(precision)
    if op.dtype in _FORMATS and op.kernel in device.kernels:
        speed = 1e12 * device.kernels[op.kernel]
    return max(op.flops / speed, op.num_bytes / (device.memory_gib_s * 2**30)) + device.op_us * 1e-6


def _begin_us(op: Op, device: DeviceProfile, first_us: float) -> float:
    """What is counted once for each kernel: for an operator that is joined to those before, nothing."""
    return 0.0 if op.kernel == POINTWISE and POINTWISE in device.kernels and not op.begins_kernel else first_us


class _Clock:
    """The time of each event: that of the device, or of the host, whichever is later."""

    def __init__(self, device: DeviceProfile):
        self._device = device
        self._events: list[int] = []
        self._times: list[float] = []
        self._computed = self._issued = self._linked = 0.0
        # When each communication ends.
        self._ends: list[float] = []

    def run(self, op: Op, duration: float) -> None:
        """The next operator."""
        device = self._device
        if op.message == WAIT:
            if len(self._ends) > op.age:
                self._computed = max(self._computed, self._ends[-1 - op.age])
        else:
            self._issued += _begin_us(op, device, device.host_us) * 1e-6
            # It starts when it has been issued, and the one before has ended.
            begin = max(self._computed, self._issued)
            if op.message and not device.is_cpu:
                self._linked = max(begin, self._linked) + duration
                self._ends.append(self._linked)
            else:
                self._computed = begin + duration
                self._ends += [self._computed] if op.message else []
        self._events.append(op.event)
        self._times.append(self._computed)

    def at(self, event: int) -> float:
        """When everything had run that came before an event."""
        index = bisect_right(self._events, event)
        return self._times[index - 1] if index else 0.0
