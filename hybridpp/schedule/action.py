"""The actions that schedules consist of."""

from enum import StrEnum
from typing import NamedTuple, TypeAlias


class ActionKind(StrEnum):
    """What an action does; the values are the letters of its text form.

    The backward pass of a micro-batch through a stage is one action, B, or two: I computes the gradient of the stage's
    input, which the previous stage needs; W computes the gradients of the parameters at any later time.
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
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"

    @property
    def computes(self) -> bool:
        """Whether it runs part of the model; these actions are in a schedule before lowering."""
        return self in (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)


class Action(NamedTuple):
    """One thing that a rank does, printed as ``2F0``: stage 2, forward, micro-batch 0.

    ``microbatch`` is None for actions of a stage that belong to no micro-batch (``2REDUCE_GRAD``). The stage of a
    receive is the receiver, the stage of a send is the sender.
    """

    stage: int
    kind: ActionKind
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"

    @property
    def in_words(self) -> str:
        """For example ``forward of stage 2, micro-batch 0 (2F0)``."""
        microbatch = "" if self.microbatch is None else f", micro-batch {self.microbatch}"
        return f"{_WORDS[self.kind]} stage {self.stage}{microbatch} ({self})"


_WORDS = {
    ActionKind.FORWARD: "forward of",
    ActionKind.BACKWARD: "backward of",
    ActionKind.INPUT_GRADIENT: "input gradient of",
    ActionKind.WEIGHT_GRADIENT: "weight gradients of",
    ActionKind.SEND_ACTIVATION: "sending activations of",
    ActionKind.RECEIVE_ACTIVATION: "receiving activations for",
    ActionKind.SEND_GRADIENT: "sending gradients of",
    ActionKind.RECEIVE_GRADIENT: "receiving gradients for",
    ActionKind.REDUCE_GRADIENTS: "reducing gradients of",
    ActionKind.UNSHARD: "gathering weights of",
    ActionKind.RESHARD: "freeing weights of",
}


Program: TypeAlias = tuple[Action, ...]
"""The actions of one rank, in order."""

Programs: TypeAlias = tuple[Program, ...]
"""The program of every rank of a pipeline."""
