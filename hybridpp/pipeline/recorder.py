"""Recording of when each action ran, by the clock of the device that ran it."""

import time
from typing import Protocol

import torch

from hybridpp.schedule import Action
from hybridpp.timeline import Span


class Recorder(Protocol):
    """Records when actions start and end."""

    def start(self) -> None:
        """The next action starts now; called again after the action has waited for a message."""

    def end(self, action: Action) -> None:
        """The action ends now."""


class HostRecorder:
    """Records the host's time, on the clock that all processes of a machine share.

    Args:
        rank: the rank in the pipeline.
    """

    def __init__(self, rank: int):
        self._rank = rank
        self._start = 0
        self._actions: list[tuple[Action, int, int]] = []

    def start(self) -> None:
        self._start = time.monotonic_ns()

    def end(self, action: Action) -> None:
        self._actions.append((action, self._start, time.monotonic_ns()))

    def spans(self) -> list[Span]:
        """The recorded actions, in milliseconds."""
        return [
            Span(self._rank, action.stage, str(action.kind), action.microbatch, start / 1e6, end / 1e6)
            for action, start, end in self._actions
        ]


class DeviceRecorder:
    """Records a CUDA device's time with events, which are converted to the host's clock at the end.

    Args:
        rank: the rank in the pipeline.
        device: whose current stream runs the actions.
    """

    def __init__(self, rank: int, device: torch.device):
        self._rank = rank
        self._stream = torch.cuda.current_stream(device)
        torch.cuda.synchronize(device)
        self._zero_ms = time.monotonic_ns() / 1e6
        self._zero = self._event()
        self._started = self._zero
        self._actions: list[tuple[Action, torch.cuda.Event, torch.cuda.Event]] = []

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch
        event.record(self._stream)
        return event

    def start(self) -> None:
        self._started = self._event()

    def end(self, action: Action) -> None:
        self._actions.append((action, self._started, self._event()))

    def spans(self) -> list[Span]:
        """The recorded actions, in milliseconds; waits for the device."""
        self._stream.synchronize()
        return [
            Span(
                self._rank,
                action.stage,
                str(action.kind),
                action.microbatch,
                self._zero_ms + self._zero.elapsed_time(start),
                self._zero_ms + self._zero.elapsed_time(end),
            )
            for action, start, end in self._actions
        ]
