"""The steps of a recording: how long each took, and what each rank's time in one went to."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from hybridpp.report.recording import Recording
from hybridpp.report.records import Phase, RankRecord, RankWait

USES = {
    "F": "forward",
    "B": "backward",
    "I": "gradient of inputs",
    "W": "gradient of weights",
    "collectives": "waits in collectives",
    "messages": "waits for messages",
    "ranks": "waits for other ranks at the start or end",
    "communication": "starts messages or sums",
    "between": "between actions",
    "read": "reads the batch",
    "end": "end of the step",
    "update": "updates weights",
    "outside": "outside of the step",
}
"""What a rank's time is used for, by the name of the use, with words for it."""

COMPUTES = ("F", "B", "I", "W")


class Step(NamedTuple):
    """From the first rank's start to the last one's end, in milliseconds."""

    number: int
    start_ms: float
    end_ms: float

    @property
    def duration_ms(self) -> float:
        """How long it took."""
        return self.end_ms - self.start_ms


@dataclass(frozen=True)
class RankUse:
    """What the time of a rank in a step went to, in milliseconds, by the names of :data:`USES`; they add up to it."""

    rank: RankRecord
    ms: dict[str, float]

    @property
    def computing_ms(self) -> float:
        """The time in which it ran the model."""
        return sum(self.ms[name] for name in COMPUTES)


def steps_of(recording: Recording) -> list[Step]:
    """The recorded steps in which something ran, in order."""
    bounds: dict[int, list[float]] = {}
    for rank in recording.ranks:
        for phase in rank.phases:
            bounds.setdefault(phase.step, []).extend((phase.start_ms, phase.end_ms))
        for action in rank.actions:
            bounds.setdefault(action.step, []).extend((action.ready_ms, action.end_ms))
    return [Step(number, min(times), max(times)) for number, times in sorted(bounds.items())]


def median_step(steps: Iterable[Step]) -> Step | None:
    """The step of median length; of an even number, the shorter one in the middle. None: there is none."""
    in_order = sorted(steps, key=lambda step: step.duration_ms)
    return in_order[(len(in_order) - 1) // 2] if in_order else None


def use_of(rank: RankRecord, step: Step) -> RankUse:
    """What a rank's time in a step went to.

    Its forwards and backwards are counted without the time in which it waited for others in them.
    """
    ms = dict.fromkeys(USES, 0.0)
    for action in rank.actions:
        if action.step != step.number:
            continue
        duration_ms = action.end_ms - action.start_ms
        waited_ms = min(action.waited_ms, duration_ms)
        ms[action.kind if action.computes else "communication"] += duration_ms - waited_ms
        ms["collectives"] += waited_ms
        ms["messages"] += action.start_ms - action.ready_ms
    in_actions_ms = sum(ms.values())
    for phase in rank.phases:
        if phase.step == step.number and phase.name in ms:
            waited_ms = sum(wait.end_ms - wait.start_ms for wait in rank.waits if _is_in(wait, phase))
            ms[phase.name] += max(0.0, phase.end_ms - phase.start_ms - waited_ms)
            ms["ranks"] += min(waited_ms, phase.end_ms - phase.start_ms)
        elif phase.step == step.number:
            ms["between"] += max(0.0, phase.end_ms - phase.start_ms - in_actions_ms)
    ms["outside"] = max(0.0, step.duration_ms - sum(ms.values()))
    return RankUse(rank, ms)


def _is_in(wait: RankWait, phase: Phase) -> bool:
    return wait.step == phase.step and phase.start_ms <= wait.start_ms < phase.end_ms


def readings(rank: RankRecord, step: int | None = None) -> list[int]:
    """What was read of a rank's memory in use, in bytes, in order; of one step, or of all (None)."""
    return [action.memory for action in rank.actions if action.memory is not None and step in (None, action.step)]
