"""One action of a rank, with its start and end."""

from typing import NamedTuple

COMPUTE_KINDS = ("F", "B", "I", "W")
"""Forward, unsplit backward, gradient of the input, gradient of the weights; all other kinds communicate or wait."""


class Span(NamedTuple):
    """What a rank did from ``start_ms`` to ``end_ms``, in milliseconds on one clock for all ranks.

    ``kind`` is the letter, or the word, of a schedule's action: ``F``, ``B``, ``I``, ``W``, ``SEND_F``,
    ``REDUCE_GRAD``. ``microbatch`` is None for actions of a stage that belong to no micro-batch.
    """

    rank: int
    stage: int
    kind: str
    microbatch: int | None
    start_ms: float
    end_ms: float

    @property
    def duration_ms(self) -> float:
        """Its duration in milliseconds."""
        return self.end_ms - self.start_ms

    @property
    def computes(self) -> bool:
        """Whether the rank ran part of the model, rather than communicated or waited."""
        return self.kind in COMPUTE_KINDS

    @property
    def name(self) -> str:
        """As the action is written in a schedule: ``2F0``, ``2REDUCE_GRAD``."""
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"
