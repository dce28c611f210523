"""What the script of a report draws, as JSON: whole microseconds from the start of the recording, in short rows."""

from collections.abc import Sequence
from typing import Any

from hybridpp.report.prediction import Prediction
from hybridpp.report.recording import Recording
from hybridpp.report.records import RankRecord
from hybridpp.report.steps import Step

# Actions of all ranks that a page has; more make it slow to load.
_MAX_ACTIONS = 100_000


def shown_steps(recording: Recording, steps: Sequence[Step], chosen: Step) -> list[Step]:
    """The chosen step and those around it, as many as a page can draw; the chosen one in any case."""
    num_actions = dict.fromkeys((step.number for step in steps), 0)
    for rank in recording.ranks:
        for action in rank.actions:
            num_actions[action.step] += 1
    at = next(index for index, step in enumerate(steps) if step.number == chosen.number)
    low, high, left = at, at + 1, _MAX_ACTIONS - num_actions[chosen.number]
    while low > 0 or high < len(steps):
        # The nearer one, of two that are as near the earlier.
        goes_back = low > 0 and (high == len(steps) or at - low <= high - 1 - at)
        step = steps[low - 1 if goes_back else high]
        if (left := left - num_actions[step.number]) < 0:
            break
        low, high = (low - 1, high) if goes_back else (low, high + 1)
    return list(steps[low:high])


def page_data(
    recording: Recording,
    steps: Sequence[Step],
    chosen: Step,
    predictions: dict[tuple[int, int], Prediction],
) -> dict[str, Any]:
    """The data.

    Args:
        recording: of some ranks.
        steps: that are shown.
        chosen: the one that is shown first.
        predictions: by pipeline.
    """
    kinds = sorted({action.kind for rank in recording.ranks for action in rank.actions})
    groups = sorted({wait.group for rank in recording.ranks for wait in rank.waits})
    zero_ms, numbers = steps[0].start_ms, {step.number for step in steps}
    memory_kinds = (rank.memory_kind for rank in recording.ranks)
    in_pipelines = [rank for ranks in recording.pipelines().values() for rank in ranks]
    return {
        "kinds": kinds,
        "groups": groups,
        "phases": _PHASES,
        "steps": [[step.number, _us(step.start_ms - zero_ms), _us(step.end_ms - zero_ms)] for step in steps],
        "chosen": chosen.number,
        "memory": next((kind for kind in memory_kinds if kind not in (None, "shared")), None),
        "ranks": [_rank(rank, kinds, groups, numbers, zero_ms) for rank in in_pipelines],
        "predicted": [
            _predicted(rank.pp, predictions[rank.dp, rank.tp], kinds, zero_ms)
            if (rank.dp, rank.tp) in predictions
            else None
            for rank in in_pipelines
        ],
    }


_PHASES = ["read", "end", "update"]


def _rank(
    rank: RankRecord, kinds: Sequence[str], groups: Sequence[str], steps: set[int], zero_ms: float
) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "place": [rank.dp, rank.pp, rank.tp],
        "actions": [
            [
                kinds.index(action.kind),
                action.stage,
                -1 if action.microbatch is None else action.microbatch,
                action.step,
                _us(action.ready_ms - zero_ms),
                _us(action.start_ms - zero_ms),
                _us(action.end_ms - zero_ms),
                action.memory,
                action.peer,
                action.message_bytes,
                action.collective_bytes,
                _us(action.waited_ms),
            ]
            for action in sorted(rank.actions, key=lambda action: action.start_ms)
            if action.step in steps
        ],
        "phases": [
            [_PHASES.index(phase.name), phase.step, _us(phase.start_ms - zero_ms), _us(phase.end_ms - zero_ms)]
            for phase in rank.phases
            if phase.step in steps and phase.name in _PHASES
        ],
        "waits": [
            [groups.index(wait.group), _us(wait.start_ms - zero_ms), _us(wait.end_ms - zero_ms)]
            for wait in rank.waits
            if wait.step in steps
        ],
    }


def _predicted(position: int, prediction: Prediction, kinds: Sequence[str], zero_ms: float) -> list[list[int]]:
    """The simulated step of a rank, from the time at which the measured one began to compute."""
    begin_ms = prediction.measured.start_ms - prediction.timeline.start_ms - zero_ms
    return [
        [
            kinds.index(span.kind),
            span.stage,
            -1 if span.microbatch is None else span.microbatch,
            _us(span.start_ms + begin_ms),
            _us(span.end_ms + begin_ms),
        ]
        for span in prediction.timeline.of_rank(position)
        if span.computes
    ]


def _us(time_ms: float) -> int:
    return round(1e3 * time_ms)
