"""When the units of a model run, in seconds: measured, or made up of what their operators compute and move."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class UnitTimes:
    """The times of one micro-batch with all layers of the model on one rank, in seconds from the start.

    Attributes:
        key: what was run, as text.
        names: of the units, in the order of their calls.
        begins, ends: of each call.
        gradients: when the backward pass came to each call; None: it has none.
        loss: when the loss was computed.
        backward_end: when B, or I, had run.
        end: when everything had run.
    """

    key: str
    names: tuple[str, ...]
    begins: tuple[float, ...]
    ends: tuple[float, ...]
    gradients: tuple[float | None, ...]
    loss: float
    backward_end: float
    end: float

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "UnitTimes":
        """From what JSON makes of it."""
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        return cls(**given)

    def forward(self, first: int, last: int) -> float:
        """Of a stage that has the calls from ``first`` to ``last``."""
        # What container code does before the first call, every stage does.
        begin = 0.0 if first == 0 else self.ends[first - 1] - self.begins[0]
        return max(0.0, (self.loss if last == len(self.ends) - 1 else self.ends[last]) - begin)

    def within(self, first: int, last: int, names: Collection[str]) -> float:
        """The forwards of these units of that stage alone."""
        calls = range(first, last + 1)
        return sum(self.ends[call] - self.begins[call] for call in calls if self.names[call] in names)

    def backward(self, first: int, last: int) -> float:
        """B of that stage, or I."""
        begin = self.loss if last == len(self.ends) - 1 else self._gradient_after(last)
        return max(0.0, (self.backward_end if first == 0 else self._gradient_after(first - 1)) - begin)

    def weight_gradients(self, first: int, last: int) -> float:
        """W of that stage: its share of all, by the time of I."""
        in_all = self.backward(0, len(self.ends) - 1)
        return (self.end - self.backward_end) * (self.backward(first, last) / in_all if in_all else 0.0)

    def _gradient_after(self, call: int) -> float:
        own = self.gradients[call]
        later = [time for time in self.gradients[call:] if time is not None]
        return own if own is not None else max(later, default=self.loss)


def median_times(runs: Sequence[UnitTimes]) -> UnitTimes:
    """The run whose length is the median."""
    return sorted(runs, key=lambda run: run.end)[len(runs) // 2]
