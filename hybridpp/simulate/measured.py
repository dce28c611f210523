"""Costs of stages from a measured run."""

from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean

from hybridpp.errors import ConfigError
from hybridpp.schedule import ActionKind
from hybridpp.timeline import Timeline, transfers

_RECEIVES = (ActionKind.RECEIVE_ACTIVATION, ActionKind.RECEIVE_GRADIENT)
_SENDS = (ActionKind.SEND_ACTIVATION, ActionKind.SEND_GRADIENT)


def measured_ms(timeline: Timeline, num_stages: int) -> dict[str, tuple[float, ...]]:
    """The times of ``Costs``, by the name of the field: see ``Costs.from_timeline``.

    Raises:
        ConfigError: a stage has no forward or no backward in the timeline.
    """
    taken: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    for span in timeline.spans:
        taken[span.stage, span.kind].append(span.duration_ms)
    # Means, because they add up to the measured total; medians of these skewed times add up to less.
    means = {cell: fmean(times) for cell, times in taken.items()}
    stages = range(num_stages)
    gradients = [_gradients_ms(means, stage) for stage in stages]
    return {
        "forward_ms": tuple(_known(means.get((stage, ActionKind.FORWARD)), stage, "forward") for stage in stages),
        "input_gradient_ms": tuple(input_ms for input_ms, _ in gradients),
        "weight_gradient_ms": tuple(weight_ms for _, weight_ms in gradients),
        "backward_ms": tuple(means.get((stage, ActionKind.BACKWARD), sum(gradients[stage])) for stage in stages),
        "send_ms": _send_ms(timeline, num_stages),
        "post_ms": tuple(_post_ms(taken, stage) for stage in stages),
    }


def _gradients_ms(means: dict[tuple[int, str], float], stage: int) -> tuple[float, float]:
    unsplit = means.get((stage, ActionKind.BACKWARD))
    half = None if unsplit is None else unsplit / 2
    return (
        _known(means.get((stage, ActionKind.INPUT_GRADIENT), half), stage, "backward"),
        _known(means.get((stage, ActionKind.WEIGHT_GRADIENT), half), stage, "backward"),
    )


def _known(time_ms: float | None, stage: int, pass_name: str) -> float:
    if time_ms is None:
        raise ConfigError(
            f"the timeline has no {pass_name} of stage {stage}. Measure a complete training step, on all ranks."
        )
    return time_ms


def _send_ms(timeline: Timeline, num_stages: int) -> tuple[float, ...]:
    """The shortest gap between producer and consumer at each boundary between stages."""
    gaps: defaultdict[int, list[float]] = defaultdict(list)
    for transfer in transfers(timeline):
        gaps[min(transfer.producer.stage, transfer.consumer.stage)].append(max(0.0, transfer.gap_ms))
    return tuple(min(gaps[stage], default=0.0) for stage in range(num_stages - 1))


def _post_ms(taken: Mapping[tuple[int, str], list[float]], stage: int) -> float:
    """The mean time of a stage's measured sends and receives. Simulated sends are messages in transit."""
    received = [time for kind in _RECEIVES for time in taken.get((stage, kind), ())]
    sent = [time for kind in _SENDS for time in taken.get((stage, kind), ())]
    return fmean([*received, *sent]) if received else 0.0
