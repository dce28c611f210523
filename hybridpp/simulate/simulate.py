"""Simulate a schedule with given costs."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from hybridpp.errors import ConfigError
from hybridpp.schedule import Action, ActionKind, Program, Programs, check_program, peak_activations, placement
from hybridpp.schedule.dependencies import needs, result, walk
from hybridpp.schedule.lower import FILLS_GRADIENTS
from hybridpp.simulate.costs import Costs
from hybridpp.timeline import Span, Timeline


@dataclass(frozen=True)
class Simulation:
    """A simulated step.

    Args:
        timeline: every action, and every message whose duration is not 0.
        peak_activations: the largest number of micro-batches that each rank holds at once, counted per stage.
        peak_bytes: the largest number of bytes that each rank holds at once for them.
    """

    timeline: Timeline
    peak_activations: tuple[int, ...]
    peak_bytes: tuple[float, ...]

    @property
    def idle_share(self) -> float:
        """The share of all ranks' time in which they do not compute, between 0 and 1."""
        return self.timeline.idle_share


def simulate(programs: Programs, costs: Costs, num_steps: int = 1, *, barrier: bool = False) -> Simulation:
    """Simulate steps of compute programs (before lowering) with these costs.

    A rank runs its actions in order. An action starts when its rank is free and its inputs have arrived. Messages block
    neither ranks nor each other, except for the time that a rank itself spends on each. Reductions over replicas run
    beside the actions, one at a time on each rank; a rank is done with a step when they are.

    Args:
        programs: of one step.
        costs: of each stage.
        num_steps: steps in a row. A rank begins the next one when it is done with its own part of the step before.
            Micro-batches are numbered over all steps.
        barrier: whether all ranks wait for each other between two steps, as they do in fp16 and where the norm of all
            gradients is needed.

    Raises:
        ScheduleError: the programs are incomplete or deadlock.
        ConfigError: the costs are for another number of stages, or there is no step, or too many actions.
    """
    _check(programs, costs)
    if num_steps < 1:
        raise ConfigError(f"num_steps must be at least 1: got {num_steps}.")
    if num_steps * (num_actions := sum(map(len, programs))) > _MAX_ACTIONS:
        raise ConfigError(
            f"at most {_MAX_ACTIONS} actions are simulated: got num_steps={num_steps} of {num_actions} actions each. "
            f"Use at most {max(1, _MAX_ACTIONS // num_actions)} steps."
        )

    def compute_ms(action: Action) -> float:
        return costs.compute_ms(action.stage, action.kind)

    steps = [_numbered_from(programs, step) for step in range(num_steps)]
    # Without a barrier, all steps are one program of each rank.
    parts = steps if barrier else [tuple(tuple(chain(*rows)) for rows in zip(*steps, strict=True))]
    last = _last_of_stages(steps)
    spans: list[Span] = []
    for part in parts:
        spans += _spans(part, costs, compute_ms, last, begin_ms=max((span.end_ms for span in spans), default=0.0))
    return _simulation(programs, costs, spans)


def simulate_draws(programs: Programs, measured: Timeline, num_draws: int = 100, seed: int = 0) -> list[Simulation]:
    """Simulate steps in which each action's time is drawn from the measured times of its stage and kind.

    Times vary, and ranks that wait for each other wait for the slower one, so a step takes longer than one in which
    every action takes its mean time. The mean over the draws is the expected step time; their spread is that of steps.

    Args:
        programs: of compute actions, before lowering.
        measured: one or more steps of a schedule with the same stages and kinds of actions.
        num_draws: number of steps.
        seed: seed of the draws.

    Raises:
        ScheduleError: the programs are incomplete or deadlock.
        ConfigError: the run lacks a stage and kind of action that the programs have.
    """
    costs = Costs.from_timeline(measured, len(placement(programs)))
    _check(programs, costs)
    seen: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    for span in measured.spans:
        seen[span.stage, span.kind].append(span.duration_ms)
    for action in (action for program in programs for action in program):
        if not seen[action.stage, action.kind]:
            raise ConfigError(
                f"the measured run has no {action.kind} of stage {action.stage}, which the programs have. Measure the "
                "same schedule, or simulate with Costs.from_timeline, which converts between B and I with W."
            )
    generator, last = random.Random(seed), _last_of_stages([programs])
    return [
        _simulation(
            programs,
            costs,
            _spans(programs, costs, lambda one: generator.choice(seen[one.stage, one.kind]), last),
        )
        for _ in range(num_draws)
    ]


def _check(programs: Programs, costs: Costs) -> None:
    check_program(programs)
    num_stages = len(placement(programs))
    if costs.num_stages != num_stages:
        raise ConfigError(
            f"the schedule has {num_stages} stages, the costs are for {costs.num_stages}. Give costs for each stage."
        )


def _numbered_from(programs: Programs, step: int) -> Programs:
    """The programs of one of several steps: micro-batches are numbered over all of them."""
    first = step * (1 + max((action.microbatch or 0 for program in programs for action in program), default=0))
    return tuple(
        tuple(action._replace(microbatch=first + (action.microbatch or 0)) for action in program)
        for program in programs
    )


def _simulation(programs: Programs, costs: Costs, spans: Iterable[Span]) -> Simulation:
    """The result of spans of one or more steps, which hold the same."""
    peaks = tuple(peak_bytes(program, costs) for program in programs)
    return Simulation(Timeline(tuple(spans)), peak_activations(programs), peaks)


def _last_of_stages(steps: Sequence[Programs]) -> dict[Action, bool]:
    """The last B or W of each stage in each step, and whether the rank ends its step with it."""
    found: dict[Action, bool] = {}
    for program in (program for programs in steps for program in programs):
        last = {action.stage: action for action in program if action.kind in FILLS_GRADIENTS}
        found |= {action: action == program[-1] for action in last.values()}
    return found


def _spans(
    programs: Programs,
    costs: Costs,
    compute_ms: Callable[[Action], float],
    last_of_stages: Mapping[Action, bool],
    begin_ms: float = 0.0,
) -> Iterator[Span]:
    rank_of = placement(programs)
    free_ms = [begin_ms] * len(programs)
    reduced_ms = [begin_ms] * len(programs)
    made_ms: dict[Action, float] = {}

    def message_ms(source: int, target: int) -> float:
        return costs.message_ms(source, target) if rank_of[source] != rank_of[target] else 0.0

    for rank, index in walk(programs):
        action = programs[rank][index]
        stage, kind, microbatch = action
        needed = needs(action, len(rank_of))
        num_received = sum(rank_of[need.stage] != rank for need in needed)
        arrivals = (made_ms[need] + message_ms(need.stage, stage) for need in needed)
        start_ms = max(free_ms[rank] + num_received * costs.posting_ms(stage), *arrivals, 0.0)
        end_ms = start_ms + compute_ms(action)
        free_ms[rank] = made_ms[result(action)] = end_ms
        yield Span(rank, stage, kind, microbatch, start_ms, end_ms)
        step, message = _SENDS.get(kind, (0, kind))
        if 0 <= stage + step < len(rank_of) and rank_of[stage + step] != rank:
            free_ms[rank] += costs.posting_ms(stage)
            if (transfer_ms := message_ms(stage, stage + step)) > 0:
                yield Span(rank, stage, message, microbatch, end_ms, end_ms + transfer_ms)
        if action in last_of_stages:
            if (reducing_ms := costs.reducing_ms(stage)) > 0:
                start_ms = max(end_ms, reduced_ms[rank])
                reduced_ms[rank] = start_ms + reducing_ms
                yield Span(rank, stage, ActionKind.REDUCE_GRADIENTS, None, start_ms, reduced_ms[rank])
            if last_of_stages[action]:
                free_ms[rank] = max(free_ms[rank], reduced_ms[rank])


# Each takes some microseconds and a kilobyte.
_MAX_ACTIONS = 2**21
# The consumer's stage relative to the producer's, and the kind of the message.
_SENDS = {
    ActionKind.FORWARD: (1, ActionKind.SEND_ACTIVATION),
    ActionKind.BACKWARD: (-1, ActionKind.SEND_GRADIENT),
    ActionKind.INPUT_GRADIENT: (-1, ActionKind.SEND_GRADIENT),
}


def peak_bytes(program: Program, costs: Costs) -> float:
    """The largest number of bytes that a rank holds at once for its micro-batches."""
    held = (costs.held_bytes(action.stage, action.kind) for action in program)
    return max(0.0, *accumulate(held))
