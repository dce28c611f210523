"""Factors on the base learning rate, as functions of the step.

They are objects with ``__call__``, because ``LambdaLR.state_dict`` saves the attributes of objects and drops functions.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass


@dataclass
class Warmup:
    """Rises to 1 in ``warmup_steps`` steps, starting above 0; then 1.

    Attributes:
        total_steps: of the schedule, warm-up included.
        warmup_steps: number of steps with a factor below 1.
    """

    total_steps: int
    warmup_steps: int

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        return self.after(step)

    def after(self, step: int) -> float:
        """The factor at a step after the warm-up; ``step`` is counted from the start of the schedule."""
        return 1.0


@dataclass
class Linear(Warmup):
    """Warm-up, then a straight line down to ``end``, which it keeps."""

    end: float = 0.0

    def after(self, step: int) -> float:
        if step >= self.total_steps:
            return self.end
        progress = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return self.end + (1.0 - self.end) * self.decay(progress)

    def decay(self, progress: float) -> float:
        """The remaining fraction of the decay, from 1 to 0, as ``progress`` goes from 0 to 1."""
        return 1.0 - progress


@dataclass
class Polynomial(Linear):
    """Warm-up, then a power of a straight line down to ``end``."""

    power: float = 1.0

    def decay(self, progress: float) -> float:
        return float((1.0 - progress) ** self.power)


@dataclass
class Cosine(Linear):
    """Warm-up, then half a cosine down to ``end``."""

    def decay(self, progress: float) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass
class FlatCosine(Cosine):
    """Warm-up, then 1 for ``num_flat`` steps, then half a cosine down to ``end``."""

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
    """Warm-up, then multiplied by ``gamma`` at each of the ``milestones``, counted from the start of the schedule."""

    milestones: tuple[int, ...] = ()
    gamma: float = 0.1

    def after(self, step: int) -> float:
        return float(self.gamma ** bisect_right(sorted(self.milestones), step))


@dataclass
class Exponential(Warmup):
    """Warm-up, then multiplied by ``gamma`` at every step."""

    gamma: float = 1.0

    def after(self, step: int) -> float:
        return float(self.gamma ** (step - self.warmup_steps))
