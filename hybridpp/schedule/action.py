"""The words that schedules are written in."""

from enum import StrEnum
from typing import NamedTuple, TypeAlias


class Kind(StrEnum):
    """What an action does; the values are the letters of its text form.

    A micro-batch goes back through a stage in one action, B, or in two: I hands the gradient on to the stage before,
    W works out the parameters' gradients at any later time.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    SEND_ACTIVATION = "SEND_F"
    RECEIVE_ACTIVATION = "RECV_F"
    SEND_GRADIENT = "SEND_B"
    RECEIVE_GRADIENT = "RECV_B"
    REDUCE_GRADIENTS = "REDUCE_GRAD"

    @property
    def computes(self) -> bool:
        """Whether it runs part of the model, so that it stands in a schedule before lowering."""
        return self in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)


class Action(NamedTuple):
    """One thing that a rank does, printed as ``2F0``: stage 2, forward, micro-batch 0.

    ``microbatch`` is None for what concerns the whole stage (``2REDUCE_GRAD``). A receive's stage is the one that
    receives, a send's the one that sends.
    """

    stage: int
    kind: Kind
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


Program: TypeAlias = tuple[Action, ...]
"""What one rank does, in order."""

Programs: TypeAlias = tuple[Program, ...]
"""What every rank of a pipeline does."""
