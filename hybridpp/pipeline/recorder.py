"""Recording of when each action ran, by the clock of the device that ran it, and what it communicated and left held."""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from hybridpp.cluster import Awaited
from hybridpp.pipeline.memory_in_use import MemoryReader
from hybridpp.schedule import Action, ActionKind
from hybridpp.timeline import Span

_COMPUTES = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
T = TypeVar("T")


class Recorder(Protocol):
    """Records when actions start and end."""

    def start(self) -> None:
        """The next action starts now; called again after the action has waited for a message."""

    def end(self, action: Action) -> None:
        """The action ends now."""


class PhaseRecorder(Recorder, Protocol):
    """Also records the phases of steps."""

    def mark(self, phase: str) -> None:
        """The rank is in this phase of a step from now on: ``"read"``, which begins one, ``"actions"``, ``"end"``,
        ``"update"``; empty: outside.
        """


class ActiveRecording(Protocol):
    """A recording under way."""

    @property
    def recorder(self) -> PhaseRecorder:
        """Of this rank."""


class RecordedAction(NamedTuple):
    """An action that ran; times in milliseconds.

    Attributes:
        step: number of the recorded step, from 0.
        action: that ran.
        ready_ms: when the rank came to it; until ``start_ms`` it waited for a message.
        start_ms: when it began to run.
        end_ms: when it ended.
        memory: bytes in use after it; None: not read.
        peer: rank of the world at the other end of its message; None: it has none.
        message_bytes: of its message.
        collective_bytes: of the tensors that it gave to collectives.
        waited_ms: the time from ``start_ms`` that the host waited for other ranks, in collectives.
    """

    step: int
    action: Action
    ready_ms: float
    start_ms: float
    end_ms: float
    memory: int | None
    peer: int | None
    message_bytes: int
    collective_bytes: int
    waited_ms: float


class Traffic(NamedTuple):
    """Communications of one kind in a group: in which step, how many, and bytes of this rank's tensors."""

    step: int
    group: str
    kind: str
    num_calls: int
    num_bytes: int


class Wait(NamedTuple):
    """A wait for other ranks outside of actions: in which step, for which group, from when to when."""

    step: int
    group: str
    start_ms: float
    end_ms: float


class Mark(NamedTuple):
    """In which phase of a step the rank was from a time on, see :meth:`PhaseRecorder.mark`."""

    step: int
    phase: str
    time_ms: float


@dataclass
class _Open(Generic[T]):
    """An action under way; times as the clock gives them."""

    ready: T
    start: T
    peer: int | None = None
    message_bytes: int = 0
    collective_bytes: int = 0
    waited_ns: int = 0


@dataclass
class _Notes(Generic[T]):
    actions: list[tuple[int, Action, _Open[T], T, int | None]] = field(default_factory=list)
    marks: list[tuple[int, str, T]] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    traffic: defaultdict[tuple[int, str, str], list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))


class _BaseRecorder(Generic[T]):
    """A recorder for some clock; it also observes the rank's communications.

    Args:
        rank: the rank in the pipeline.
        memory: reads the memory in use after each action that computes; None: it is not read.
    """

    def __init__(self, rank: int, memory: MemoryReader | None = None):
        self._rank, self._memory = rank, memory
        self._notes = _Notes[T]()
        self._open: _Open[T] | None = None
        self._wait: tuple[str, int] | None = None
        self._step = -1

    def _now(self) -> T:
        raise NotImplementedError

    def _to_ms(self) -> Callable[[T], float]:
        """What converts this clock's times to milliseconds of the host's clock; may wait for the device."""
        raise NotImplementedError

    @property
    def memory_kind(self) -> str | None:
        """What :class:`MemoryReader` counts; None: memory is not read."""
        return None if self._memory is None else self._memory.kind

    def start(self) -> None:
        now = self._now()
        if self._open is None:
            self._open = _Open(now, now)
        else:
            self._open.start, self._open.waited_ns = now, 0

    def end(self, action: Action) -> None:
        now, opened = self._now(), self._open
        assert opened is not None, "an action starts before it ends"
        self._open = None
        memory = self._memory.read() if self._memory is not None and action.kind in _COMPUTES else None
        self._notes.actions.append((self._step, action, opened, now, memory))

    def mark(self, phase: str) -> None:
        # An action that an error ended is not recorded.
        self._open = None
        if phase == "read":
            self._step += 1
        self._notes.marks.append((max(0, self._step), phase, self._now()))
        if not phase and not any(step == self._step for step, *_ in reversed(self._notes.actions)):
            # There was no batch.
            self._notes.marks = [mark for mark in self._notes.marks if mark[0] != self._step]
            self._step -= 1

    def started(self, group: str, kind: str, num_bytes: int, peer: int | None) -> None:
        count = self._notes.traffic[max(0, self._step), group, kind]
        count[0] += 1
        count[1] += num_bytes
        if self._open is None:
            return
        if peer is None:
            self._open.collective_bytes += num_bytes
        else:
            self._open.peer = peer
            self._open.message_bytes += num_bytes

    def wait_began(self, awaited: Awaited) -> None:
        self._wait = (awaited.group, time.monotonic_ns())

    def wait_ended(self) -> None:
        if self._wait is None:  # it began before the recording
            return
        (group, start), end = self._wait, time.monotonic_ns()
        self._wait = None
        if self._open is not None:
            self._open.waited_ns += end - start
        else:
            self._notes.waits.append(Wait(max(0, self._step), group, start / 1e6, end / 1e6))

    def actions(self) -> list[RecordedAction]:
        """What ran, in order; waits for the device."""
        to_ms = self._to_ms()
        return [
            RecordedAction(
                max(0, step),
                action,
                to_ms(opened.ready),
                to_ms(opened.start),
                to_ms(end),
                memory,
                opened.peer,
                opened.message_bytes,
                opened.collective_bytes,
                opened.waited_ns / 1e6,
            )
            for step, action, opened, end, memory in self._notes.actions
        ]

    def spans(self) -> list[Span]:
        """The recorded actions; waits for the device."""
        return [
            Span(self._rank, ran.action.stage, str(ran.action.kind), ran.action.microbatch, ran.start_ms, ran.end_ms)
            for ran in self.actions()
        ]

    def marks(self) -> list[Mark]:
        """The phases, in order; waits for the device."""
        to_ms = self._to_ms()
        return [Mark(step, phase, to_ms(time)) for step, phase, time in self._notes.marks]

    def waits(self) -> list[Wait]:
        """The waits outside of actions."""
        return list(self._notes.waits)

    def traffic(self) -> list[Traffic]:
        """The communications."""
        return [Traffic(*key, *counts) for key, counts in self._notes.traffic.items()]


class HostRecorder(_BaseRecorder[int]):
    """Records the host's time, on the clock that all processes of a machine share."""

    def _now(self) -> int:
        return time.monotonic_ns()

    def _to_ms(self) -> Callable[[int], float]:
        return lambda nanoseconds: nanoseconds / 1e6


class DeviceRecorder(_BaseRecorder["torch.cuda.Event"]):
    """Records a CUDA device's time with events, which are converted to the host's clock at the end.

    Args:
        rank: the rank in the pipeline.
        device: whose current stream runs the actions.
        memory: see above; torch counts what is allocated for actions when the host launches them.
    """

    def __init__(self, rank: int, device: torch.device, memory: MemoryReader | None = None):
        super().__init__(rank, memory)
        self._stream = torch.cuda.current_stream(device)
        torch.cuda.synchronize(device)
        self._zero_ms = time.monotonic_ns() / 1e6
        self._zero = self._now()

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch
        event.record(self._stream)
        return event

    def _to_ms(self) -> Callable[[torch.cuda.Event], float]:
        self._stream.synchronize()
        return lambda event: self._zero_ms + float(self._zero.elapsed_time(event))
