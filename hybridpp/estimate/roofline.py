"""Times of a run's operators, from what they compute and move."""

from bisect import bisect_right
from dataclasses import replace
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from hybridpp.estimate.devices import DeviceProfile
from hybridpp.estimate.model_run import ModelRun
from hybridpp.estimate.op_log import POINTWISE, WAIT, OpKind, Ops
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
    messages = run.ops.where(run.ops.are_messages)
    if not len(messages):
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


def _times(run: ModelRun, ops: Ops, device: DeviceProfile, tp_size: int, key: str) -> UnitTimes:
    seconds, issue_s = numpy.zeros(len(ops)), numpy.zeros(len(ops))
    for number, kind in enumerate(ops.kinds):
        here = ops.rows["kind"] == number
        rows = ops.rows[here]
        seconds[here] = _message_s(kind, rows, device, tp_size) if kind.message else _device_s(kind, rows, device)
        issue_s[here] = _begin_s(kind, rows, device, device.host_us)
    clock = _Clock(device.is_cpu)
    messages = [kind.message for kind in ops.kinds]
    columns = (ops.rows[name].tolist() for name in ("event", "kind", "age"))
    for event, kind, age, duration, issued in zip(*columns, seconds.tolist(), issue_s.tolist(), strict=True):
        if messages[kind] == WAIT:
            clock.wait(age)
        else:
            clock.run(duration, issued, bool(messages[kind]))
        clock.note(event)
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


def _message_s(kind: OpKind, rows: NDArray[Any], device: DeviceProfile, tp_size: int) -> Any:
    if kind.message == WAIT:
        return 0.0
    # A ring: each rank sends its share once, or twice.
    sizes: Any = _PASSES.get(kind.message, 1) * rows["num_bytes"] * (tp_size - 1) / tp_size
    return device.sum_s(sizes, tp_size - 1)


def _device_s(kind: OpKind, rows: NDArray[Any], device: DeviceProfile) -> Any:
    if kind.kernel == POINTWISE and POINTWISE in device.kernels:
        moved_s = rows["joined_bytes"] / (device.kernels[POINTWISE] * 2**30)
        return moved_s + _begin_s(kind, rows, device, device.op_us)
    precision = "fp32" if kind.dtype is None else _FORMATS.get(kind.dtype, "fp32")
    speed = device.flops_per_s(precision)
    if kind.dtype in _FORMATS and kind.kernel in device.kernels:
        speed = 1e12 * device.kernels[kind.kernel]
    moved_s = rows["num_bytes"] / (device.memory_gib_s * 2**30)
    return numpy.maximum(rows["flops"] / speed, moved_s) + device.op_us * 1e-6


def _begin_s(kind: OpKind, rows: NDArray[Any], device: DeviceProfile, first_us: float) -> Any:
    """What is counted once for each kernel: for an operator that is joined to those before, nothing."""
    if kind.kernel == POINTWISE and POINTWISE in device.kernels:
        return numpy.where(rows["begins_kernel"], first_us * 1e-6, 0.0)
    return first_us * 1e-6


class _Clock:
    """The time of each event: that of the device, or of the host, whichever is later.

    Args:
        is_cpu: whether communication is the work of what computes.
    """

    def __init__(self, is_cpu: bool):
        self._is_cpu = is_cpu
        self._events: list[int] = []
        self._times: list[float] = []
        self._computed = self._issued = self._linked = 0.0
        # When each communication ends.
        self._ends: list[float] = []

    def wait(self, age: int) -> None:
        """For the end of a communication, after which so many were started."""
        if len(self._ends) > age:
            self._computed = max(self._computed, self._ends[-1 - age])

    def run(self, duration: float, issue_s: float, is_message: bool) -> None:
        """The next operator."""
        self._issued += issue_s
        # It starts when it has been issued, and the one before has ended.
        begin = max(self._computed, self._issued)
        if is_message and not self._is_cpu:
            self._linked = max(begin, self._linked) + duration
            self._ends.append(self._linked)
        else:
            self._computed = begin + duration
            self._ends += [self._computed] if is_message else []

    def note(self, event: int) -> None:
        """What has run, has run before this event."""
        self._events.append(event)
        self._times.append(self._computed)

    def at(self, event: int) -> float:
        """When everything had run that came before an event."""
        index = bisect_right(self._events, event)
        return self._times[index - 1] if index else 0.0
