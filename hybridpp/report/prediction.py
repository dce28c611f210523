"""What the simulator says of recorded steps, from their own measured times."""

from collections.abc import Sequence
from dataclasses import dataclass

from hybridpp.errors import ConfigError, ScheduleError
from hybridpp.report.recording import Recording
from hybridpp.report.records import RankRecord
from hybridpp.schedule import SCHEDULES, Action, ActionKind, Programs, make_schedule, peak_activations, placement
from hybridpp.simulate import Costs, simulate
from hybridpp.timeline import Span, Timeline

# Actions of a step up to which other schedules are simulated.
_MAX_ACTIONS = 8192
_ABOUT = 1.2


@dataclass(frozen=True)
class Prediction:
    """A simulated step of one pipeline.

    Attributes:
        programs: what its ranks computed, in order.
        costs: means of the measured times.
        timeline: simulated, from 0.
        measured: the step that is simulated.
        measured_ms: of each recorded step with these programs, from the first computation to the last action's end.
        steps: the numbers of these steps.
    """

    programs: Programs
    costs: Costs
    timeline: Timeline
    measured: Timeline
    measured_ms: tuple[float, ...]
    steps: tuple[int, ...]

    @property
    def predicted_ms(self) -> float:
        """Of a step."""
        return self.timeline.makespan_ms


@dataclass(frozen=True)
class OtherSchedule:
    """A named schedule of the same stages and micro-batches, with its simulated step in milliseconds."""

    name: str
    step_ms: float


def predict(recording: Recording, step: int, dp: int = 0, tp: int = 0) -> Prediction | str:
    """The simulation of a recorded step of one pipeline, or why there is none, in words.

    The costs are the means over the recorded steps in which the ranks computed the same in the same order, and that
    took about as long, within a fifth: not those that allocate, compile or wait for a disk.
    """
    ranks = recording.pipelines()[dp, tp]
    programs = _programs(ranks, step)
    if not any(action.kind is not ActionKind.FORWARD for program in programs for action in program):
        return "the step has no backward pass"
    alike = _alike(ranks, step, programs)
    num_microbatches = 1 + max(action.microbatch or 0 for program in programs for action in program)
    measured = [_timeline(ranks, number) for number in alike]
    numbered = [
        span._replace(microbatch=None if span.microbatch is None else span.microbatch + index * num_microbatches)
        for index, timeline in enumerate(measured)
        for span in timeline.spans
    ]
    try:
        costs = Costs.from_timeline(Timeline(tuple(numbered)), len(recording.stages))
        simulation = simulate(programs, costs)
    except (ConfigError, ScheduleError) as error:
        return str(error).split(". ")[0].rstrip(".")
    times = tuple(line.makespan_ms for line in measured)
    return Prediction(programs, costs, simulation.timeline, measured[alike.index(step)], times, alike)


def other_schedules(prediction: Prediction) -> list[OtherSchedule]:
    """Named schedules of as many stages that hold no more activations, the fastest first; simulated.

    I and W are taken as half of a backward pass each, where they were not measured.
    """
    programs = prediction.programs
    num_microbatches = 1 + max(action.microbatch or 0 for program in programs for action in program)
    where, most = placement(programs), max(peak_activations(programs))
    if len(where) * num_microbatches > _MAX_ACTIONS:
        return []
    found = []
    for name, entry in SCHEDULES.items():
        chunks = len(where) // len(programs)
        try:
            other = make_schedule(name, len(programs), num_microbatches, chunks if entry.takes_chunks else None)
        except (ConfigError, ScheduleError):
            continue
        # The costs belong to these stages, and messages to this placement.
        if placement(other) == where and max(peak_activations(other)) <= most:
            found.append(OtherSchedule(name, simulate(other, prediction.costs).timeline.makespan_ms))
    return sorted(found, key=lambda one: one.step_ms)


def balanced_ms(prediction: Prediction) -> float:
    """The simulated step if all stages took equal times."""
    costs, num_stages = prediction.costs, prediction.costs.num_stages

    def mean(kind: ActionKind) -> float:
        return sum(costs.compute_ms(stage, kind) for stage in range(num_stages)) / num_stages

    equal = Costs(
        num_stages=num_stages,
        forward_ms=mean(ActionKind.FORWARD),
        input_gradient_ms=mean(ActionKind.INPUT_GRADIENT),
        weight_gradient_ms=mean(ActionKind.WEIGHT_GRADIENT),
        backward_ms=mean(ActionKind.BACKWARD),
        send_ms=costs.send_ms,
        post_ms=costs.post_ms,
    )
    return simulate(prediction.programs, equal).timeline.makespan_ms


def _alike(ranks: Sequence[RankRecord], step: int, programs: Programs) -> tuple[int, ...]:
    """The steps from whose times this one is simulated."""
    numbers = sorted({action.step for rank in ranks for action in rank.actions})
    same = [number for number in numbers if _programs(ranks, number) == programs]
    own_ms = _timeline(ranks, step).makespan_ms
    lengths_ms = {number: _timeline(ranks, number).makespan_ms for number in same}
    return tuple(number for number, length_ms in lengths_ms.items() if own_ms / _ABOUT <= length_ms <= own_ms * _ABOUT)


def _programs(ranks: Sequence[RankRecord], step: int) -> Programs:
    """What the ranks computed in a step, in order."""
    return tuple(
        tuple(
            Action(action.stage, ActionKind(action.kind), action.microbatch)
            for action in sorted(rank.actions, key=lambda action: action.start_ms)
            if action.step == step and action.computes
        )
        for rank in ranks
    )


def _timeline(ranks: Sequence[RankRecord], step: int) -> Timeline:
    spans = [
        Span(position, action.stage, action.kind, action.microbatch, action.start_ms, action.end_ms)
        for position, rank in enumerate(ranks)
        for action in rank.actions
        if action.step == step
    ]
    return Timeline(tuple(spans))
