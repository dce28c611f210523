"""The memory of a rank over a step: its program, walked action by action."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from hybridpp.estimate.stage_memory import Held, StageMemory
from hybridpp.schedule import Action, ActionKind, Program


@dataclass(frozen=True, kw_only=True)
class RankState:
    """Bytes that a rank holds all through training.

    Attributes:
        weights: in their working dtypes.
        gradients: sums of them, in at least fp32.
        masters: fp32 master weights.
        moments: the optimizer's states.
        buffers: the model's, and those in which replicas exchange gradients and weights.
        host: in host memory instead; not part of the total.
        update: that the optimizer takes beside all this while it updates, when there are no activations; not part of
            the total.
    """

    weights: int
    gradients: int
    masters: int
    moments: int
    buffers: int
    host: int = 0
    update: int = 0

    @property
    def total(self) -> int:
        """On the device."""
        return self.weights + self.gradients + self.masters + self.moments + self.buffers


@dataclass(frozen=True)
class StepPeak:
    """What a rank holds of a step's micro-batches when it holds most.

    Attributes:
        activations: of all micro-batches between their forward and backward, with what runs then.
        logits: of the last stage.
        messages: received and not used, or sent and not freed.
        action: that runs then; None: the rank runs nothing.
    """

    activations: int = 0
    logits: int = 0
    messages: int = 0
    action: Action | None = None

    @property
    def total(self) -> int:
        """All of it."""
        return self.activations + self.logits + self.messages


class _Walk:
    def __init__(self, stages: Mapping[int, StageMemory], is_here: frozenset[int]):
        self._stages, self._is_here = stages, is_here
        self._held: dict[tuple[int, int], Held] = {}
        self._waiting: dict[tuple[int, int], int] = {}
        self._messages: dict[Action, int] = {}
        # Sums of the three, as a walk has thousands of actions.
        self._activations = self._logits = self._sent = 0
        self.peak = StepPeak()

    def release(self, sends: Sequence[Action]) -> None:
        for send in sends:
            self._freed(send)

    def _freed(self, message: Action) -> None:
        self._sent -= self._messages.pop(message, 0)

    def _arrived(self, message: Action, size: int) -> None:
        self._freed(message)
        self._messages[message] = size
        self._sent += size

    def _hold(self, key: tuple[int, int], held: Held) -> None:
        self._held[key] = held
        self._activations += held.activations
        self._logits += held.logits

    def _drop(self, key: tuple[int, int]) -> None:
        held = self._held.pop(key, Held(0))
        self._activations -= held.activations
        self._logits -= held.logits

    def run(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch or 0
        memory, key = self._stages[stage], (stage, microbatch)
        match action.kind:
            case ActionKind.RECEIVE_ACTIVATION:
                self._arrived(action, memory.incoming)
            case ActionKind.RECEIVE_GRADIENT:
                self._arrived(action, memory.outgoing_gradients)
            case ActionKind.FORWARD:
                self._freed(action._replace(kind=ActionKind.RECEIVE_ACTIVATION))
                self._note(action, memory.forward)
                self._hold(key, memory.held)
                if memory.outgoing and stage + 1 not in self._is_here:
                    self._arrived(action._replace(kind=ActionKind.SEND_ACTIVATION), memory.unheld)
                elif memory.outgoing:
                    following = action._replace(stage=stage + 1, kind=ActionKind.RECEIVE_ACTIVATION)
                    self._arrived(following, memory.unheld)
            case ActionKind.BACKWARD | ActionKind.INPUT_GRADIENT:
                self._freed(action._replace(kind=ActionKind.RECEIVE_GRADIENT))
                self._drop(key)
                self._note(action, memory.backward)
                if action.kind is ActionKind.INPUT_GRADIENT:
                    self._waiting[key] = memory.waiting
                    self._activations += memory.waiting
                if memory.incoming_gradients and stage - 1 not in self._is_here:
                    self._arrived(action._replace(kind=ActionKind.SEND_GRADIENT), memory.incoming_gradients)
                elif memory.incoming_gradients:
                    before = action._replace(stage=stage - 1, kind=ActionKind.RECEIVE_GRADIENT)
                    self._arrived(before, memory.incoming_gradients)
            case ActionKind.WEIGHT_GRADIENT:
                waiting = self._waiting.pop(key, 0)
                self._activations -= waiting
                self._note(action, Held(waiting))
            case _:
                pass

    def _note(self, action: Action, during: Held) -> None:
        peak = StepPeak(during.activations + self._activations, during.logits + self._logits, self._sent, action)
        if peak.total > self.peak.total:
            self.peak = peak


def step_peak(
    program: Program, completed_sends: Sequence[Sequence[Action]], stages: Mapping[int, StageMemory]
) -> StepPeak:
    """The most that a rank holds at once.

    Args:
        program: lowered, of the rank.
        completed_sends: for each action, the sends that are freed before it.
        stages: of the rank.
    """
    walk = _Walk(stages, frozenset(stages))
    for action, sends in zip(program, completed_sends, strict=True):
        walk.release(sends)
        walk.run(action)
    return walk.peak


class ProgramPeak:
    """The most that a rank holds at once in a program, for any memory of its stages; messages are counted elsewhere.

    Moments in which the rank does the same with as many micro-batches of each stage are one: a program has few.

    Args:
        program: of compute actions.
    """

    def __init__(self, program: Program):
        self._stages = sorted({action.stage for action in program})
        counts = [0] * (2 * len(self._stages))
        moments: dict[tuple[int, ...], Action] = {}
        for action in program:
            held = self._stages.index(action.stage)
            waiting = held + len(self._stages)
            match action.kind:
                case ActionKind.FORWARD:
                    moments.setdefault((3 * held, *counts), action)
                    counts[held] += 1
                case ActionKind.BACKWARD | ActionKind.INPUT_GRADIENT:
                    counts[held] -= 1
                    moments.setdefault((3 * held + 1, *counts), action)
                    counts[waiting] += action.kind is ActionKind.INPUT_GRADIENT
                case _:
                    counts[waiting] -= 1
                    moments.setdefault((3 * held + 2, *counts), action)
        self._actions = list(moments.values())
        table = numpy.array(list(moments), dtype=numpy.int64).reshape(len(moments), 1 + len(counts))
        self._runs, self._counts = table[:, 0], table[:, 1:]

    def of(self, memories: Sequence[StageMemory]) -> StepPeak:
        """The most, when these are the memories of all stages."""
        if not self._actions:
            return StepPeak()
        own = [memories[stage] for stage in self._stages]
        during = [one for memory in own for one in (memory.forward, memory.backward, Held(memory.waiting))]
        kept = [*(memory.held for memory in own), *(Held(memory.waiting) for memory in own)]
        here = self._counts @ _table(kept) + _table(during)[self._runs]
        at = int(here.sum(axis=1).argmax())
        return StepPeak(int(here[at, 0]), int(here[at, 1]), 0, self._actions[at])


def _table(held: Sequence[Held]) -> NDArray[numpy.int64]:
    return numpy.array(held, dtype=numpy.int64)
