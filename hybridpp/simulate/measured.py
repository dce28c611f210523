"""What a measured run says about the costs of its stages."""

from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean

from hybridpp.errors import ConfigError
from hybridpp.schedule import Kind
from hybridpp.timeline import Timeline, messages

_RECEIVES = (Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT)
_SENDS = (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)


def measured_ms(timeline: Timeline, num_stages: int) -> dict[str, tuple[float, ...]]:
    """The times of ``Costs``, by the name of the field: see ``Costs.from_timeline``.

    Raises:
        ConfigError: a stage has no forward or no backward in the timeline.
    """
    taken: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    for span in timeline.spans:
        taken[span.stage, span.kind].append(span.duration_ms)
    # Means, because they add up to what was measured; medians of such times, which are skewed, add up to less.
    means = {cell: fmean(times) for cell, times in taken.items()}
    stages = range(num_stages)
    gradients = [_gradients_ms(means, stage) for stage in stages]
    return {
        "forward_ms": tuple(_known(means.get((stage, Kind.FORWARD)), stage, "forward") for stage in stages),
        "input_gradient_ms": tuple(input_ms for input_ms, _ in gradients),
        "weight_gradient_ms": tuple(weight_ms for _, weight_ms in gradients),
        "backward_ms": tuple(means.get((stage, Kind.BACKWARD), sum(gradients[stage])) for stage in stages),
        "send_ms": _send_ms(timeline, num_stages),
        "post_ms": tuple(_post_ms(taken, stage) for stage in stages),
    }


def _gradients_ms(means: dict[tuple[int, str], float], stage: int) -> tuple[float, float]:
    whole = means.get((stage, Kind.BACKWARD))
    half = None if whole is None else whole / 2
    return (
        _known(means.get((stage, Kind.INPUT_GRADIENT), half), stage, "backward"),
        _known(means.get((stage, Kind.WEIGHT_GRADIENT), half), stage, "backward"),
    )


def _known(time_ms: float | None, stage: int, pass_name: str) -> float:
    if time_ms is None:
        raise ConfigError(
            f"the timeline has no {pass_name} of stage {stage}. Measure a whole step of training, on all ranks."
        )
    return time_ms


def _send_ms(timeline: Timeline, num_stages: int) -> tuple[float, ...]:
    """The shortest gap between an action and the one that takes its result, at each boundary between stages."""
    gaps: defaultdict[int, list[float]] = defaultdict(list)
    for message in messages(timeline):
        gaps[min(message.maker.stage, message.taker.stage)].append(max(0.0, message.gap_ms))
    return tuple(min(gaps[stage], default=0.0) for stage in range(num_stages - 1))


def _post_ms(taken: Mapping[tuple[int, str], list[float]], stage: int) -> float:
    """The mean time of a stage's sends and receives, as measured. Simulated sends are messages under way."""
    received = [time for kind in _RECEIVES for time in taken.get((stage, kind), ())]
    sent = [time for kind in _SENDS for time in taken.get((stage, kind), ())]
    return fmean([*received, *sent]) if received else 0.0
