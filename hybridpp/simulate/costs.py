"""Costs of a schedule's actions: times and bytes of each stage, for one micro-batch."""

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from hybridpp.errors import ConfigError, text_of
from hybridpp.schedule import ActionKind
from hybridpp.simulate.measured import measured_ms
from hybridpp.strict_json import parse_strictly
from hybridpp.timeline import Timeline

PerStage: TypeAlias = float | tuple[float, ...]
"""One number for all stages, or one for each."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of one micro-batch in each stage. Every cost is one number for all stages, or a tuple with one per stage.

    Args:
        num_stages: stages of the pipeline, over all ranks.
        forward_ms: time of F, in milliseconds.
        input_gradient_ms: time of I.
        weight_gradient_ms: time of W.
        backward_ms: time of B; None: the sum of I and W.
        send_ms: time from the end of an action until its result has arrived on another rank; a tuple has one number for
            each of the ``num_stages - 1`` boundaries between stages, for both directions. Within a rank nothing is
            sent.
        post_ms: time that a rank itself spends on each message that it sends or receives.
        reduce_ms: time to reduce a stage's gradients over the replicas, after its last B or W. It takes no time of the
            rank; the reductions of a rank's stages follow each other. A step ends when they do.
        activation_bytes: what a stage holds from F until B or I.
        weight_gradient_bytes: what a stage holds from I until W.
        recompute_ms: time that a stage's B or I takes longer if it recomputes its activations; see
            :meth:`with_recomputation`.
        recomputed_bytes: what a stage that recomputes holds from F until B or I, instead of ``activation_bytes``; None:
            stages cannot recompute.

    Raises:
        ConfigError: a cost is negative or not finite, or a tuple has another length.
    """

    num_stages: int
    forward_ms: PerStage = 1.0
    input_gradient_ms: PerStage = 1.0
    weight_gradient_ms: PerStage = 1.0
    backward_ms: PerStage | None = None
    send_ms: PerStage = 0.0
    post_ms: PerStage = 0.0
    reduce_ms: PerStage = 0.0
    activation_bytes: PerStage = 0.0
    weight_gradient_bytes: PerStage = 0.0
    recompute_ms: PerStage = 0.0
    recomputed_bytes: PerStage | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.num_stages, int) or self.num_stages < 1:
            raise ConfigError(f"num_stages must be an integer of at least 1: got {self.num_stages!r}.")
        for field in dataclasses.fields(self)[1:]:
            if getattr(self, field.name) is not None:
                self._check(field.name)

    def _check(self, name: str) -> None:
        value = getattr(self, name)
        length, counted = self.num_stages, f"{self.num_stages} stages"
        if name == "send_ms":
            length, counted = length - 1, f"the {length - 1} boundaries of {counted}"
        numbers = value if isinstance(value, tuple) else (value,)
        for number in numbers:
            if not isinstance(number, int | float) or not math.isfinite(number) or number < 0:
                raise ConfigError(f"{name} must be a number of at least 0, or one per stage: got {number!r}.")
        if isinstance(value, tuple) and len(value) != length:
            raise ConfigError(
                f"{name} has {len(value)} numbers for {counted}. Give {length}, or one number (not a list) for all."
            )

    def compute_ms(self, stage: int, kind: ActionKind) -> float:
        """Time of a stage's F, B, I or W for one micro-batch, in milliseconds."""
        if kind is ActionKind.BACKWARD and self.backward_ms is None:
            return _at(self.input_gradient_ms, stage) + _at(self.weight_gradient_ms, stage)
        costs = {
            ActionKind.FORWARD: self.forward_ms,
            ActionKind.BACKWARD: self.backward_ms,
            ActionKind.INPUT_GRADIENT: self.input_gradient_ms,
            ActionKind.WEIGHT_GRADIENT: self.weight_gradient_ms,
        }
        return _at(costs[kind], stage)

    def message_ms(self, stage: int, other: int) -> float:
        """Time of a message between two neighbouring stages on different ranks, in milliseconds."""
        return _at(self.send_ms, min(stage, other))

    def posting_ms(self, stage: int) -> float:
        """Time that a rank itself spends on a message to or from one of its stages, in milliseconds."""
        return _at(self.post_ms, stage)

    def reducing_ms(self, stage: int) -> float:
        """Time to reduce a stage's gradients over the replicas, in milliseconds."""
        return _at(self.reduce_ms, stage)

    def held_bytes(self, stage: int, kind: ActionKind) -> float:
        """The change in the bytes that a rank holds after a stage's F, B, I or W."""
        activation, gradient = _at(self.activation_bytes, stage), _at(self.weight_gradient_bytes, stage)
        changes = {
            ActionKind.FORWARD: activation,
            ActionKind.BACKWARD: -activation,
            ActionKind.INPUT_GRADIENT: gradient - activation,
            ActionKind.WEIGHT_GRADIENT: -gradient,
        }
        return changes[kind]

    def recompute_saves_bytes(self, stage: int) -> float:
        """The bytes per micro-batch that a stage does not hold if it recomputes; 0 or less: nothing is saved."""
        if self.recomputed_bytes is None:
            return 0.0
        return _at(self.activation_bytes, stage) - _at(self.recomputed_bytes, stage)

    def recomputing_ms(self, stage: int) -> float:
        """Time that a stage's B or I takes longer if it recomputes, in milliseconds."""
        return _at(self.recompute_ms, stage)

    def with_recomputation(self, stages: Iterable[int]) -> "Costs":
        """The costs if these stages recompute their activations in B or I.

        What a stage computes again is there during its B or I only, one micro-batch at a time. It is in no
        ``held_bytes``: leave room for it.

        Raises:
            ConfigError: a stage does not exist, or ``recomputed_bytes`` is None.
        """
        chosen = frozenset(stages)
        if not chosen:
            return self
        if self.recomputed_bytes is None:
            raise ConfigError("stages recompute only where recomputed_bytes is known. Give it, one number or one each.")
        if unknown := sorted(chosen - set(range(self.num_stages))):
            raise ConfigError(f"there are {self.num_stages} stages, 0 to {self.num_stages - 1}: got {unknown[0]}.")

        def changed(values: PerStage | None, more: PerStage) -> tuple[float, ...]:
            added = (_at(more, stage) if stage in chosen else 0.0 for stage in self._stages)
            return tuple(_at(values, stage) + extra for stage, extra in enumerate(added))

        stage_bytes = (self.recomputed_bytes if stage in chosen else self.activation_bytes for stage in self._stages)
        return dataclasses.replace(
            self,
            input_gradient_ms=changed(self.input_gradient_ms, self.recompute_ms),
            backward_ms=None if self.backward_ms is None else changed(self.backward_ms, self.recompute_ms),
            activation_bytes=tuple(_at(values, stage) for stage, values in enumerate(stage_bytes)),
            # They do not recompute twice.
            recompute_ms=tuple(0.0 if stage in chosen else _at(self.recompute_ms, stage) for stage in self._stages),
        )

    @property
    def _stages(self) -> range:
        return range(self.num_stages)

    def to_json(self) -> str:
        """As JSON: an object with the names of the fields."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Costs":
        """The costs that :meth:`to_json` wrote; missing fields have their defaults.

        Raises:
            ConfigError: the text is not an object with these names, or a cost is invalid.
        """
        try:
            values: Any = parse_strictly(text)
        except ValueError as error:
            raise ConfigError(f"this text holds no costs: {text_of(error)}. Write what Costs.to_json gives.") from error
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(values, dict) or "num_stages" not in values or not values.keys() <= set(names):
            got = ", ".join(values) or "nothing" if isinstance(values, dict) else type(values).__name__
            raise ConfigError(f"costs are an object with num_stages and some of {', '.join(names[1:])}: got {got}.")
        # Types are checked together with the values.
        costs: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        return cls(**costs)

    @classmethod
    def from_timeline(cls, timeline: Timeline, num_stages: int) -> "Costs":
        """Costs from a measured training run: the mean of each stage and kind.

        If the run has only unsplit backwards, I and W are each taken as half of one. A message takes the shortest time
        measured between the end of an action and the start of its consumer on another rank; that is too long if the
        receiver was never waiting. The time that a rank spends on a message is the mean of its sends and receives; a
        simulated run has no receives, so that time is 0.

        Args:
            timeline: of any schedule of ``num_stages`` stages that trains.
            num_stages: stages of the pipeline, over all ranks.

        Raises:
            ConfigError: a stage has no forward or no backward in the timeline.
        """
        return cls(num_stages=num_stages, **measured_ms(timeline, num_stages))


def _at(values: PerStage | None, stage: int) -> float:
    if values is None:
        return 0.0
    return values[stage] if isinstance(values, tuple) else values
