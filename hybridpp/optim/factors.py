"""What a schedule multiplies a base learning rate by, step for step.

Objects, not functions, because ``LambdaLR.state_dict`` saves the attributes of objects and drops functions.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass


@dataclass
class Warmup:
    """Up to 1 in ``warmup_steps`` steps, the first of which is not zero; then 1.

    Attributes:
        total_steps: of the schedule, warm-up included.
        warmup_steps: steps below 1.
    """

    total_steps: int
    warmup_steps: int

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        return self.after(step)

    def after(self, step: int) -> float:
        """The factor at a step that is no warm-up; ``step`` is counted from the start of the schedule."""
        return 1.0


@dataclass
class Linear(Warmup):
    """Then down to ``end`` on a straight line, and stay there."""

    end: float = 0.0

    def after(self, step: int) -> float:
        if step >= self.total_steps:
            return self.end
        progress = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return self.end + (1.0 - self.end) * self.decay(progress)

    def decay(self, progress: float) -> float:
        """The part of the way down still to go, 1 to 0, while ``progress`` runs from 0 to 1."""
        return 1.0 - progress


@dataclass
class Polynomial(Linear):
    """Then down along a power of the straight line."""

    power: float = 1.0

    def decay(self, progress: float) -> float:
        return float((1.0 - progress) ** self.power)


@dataclass
class Cosine(Linear):
    """Then down along half a cosine."""

    def decay(self, progress: float) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass
class FlatCosine(Cosine):
    """Then 1 for ``num_flat`` steps, then down along half a cosine."""

    num_flat: int = 0

    def after(self, step: int) -> float:
        start = self.warmup_steps + self.num_flat
        if step >= self.total_steps:
            return self.end
        if step < start:
            return 1.0
        return self.end + (1.0 - self.end) * self.decay((step - start) / (self.total_steps - start))


@dataclass
class MultiStep(Warmup):
    """Then times ``gamma`` at each of the ``milestones``, which are steps from the start of the schedule."""

    milestones: tuple[int, ...] = ()
    gamma: float = 0.1

    def after(self, step: int) -> float:
        return float(self.gamma ** bisect_right(sorted(self.milestones), step))


@dataclass
class Exponential(Warmup):
    """Then times ``gamma`` at every step."""

    gamma: float = 1.0

    def after(self, step: int) -> float:
        return float(self.gamma ** (step - self.warmup_steps))
