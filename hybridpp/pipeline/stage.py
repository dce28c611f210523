"""What the executor asks of the model: the seam to whatever cuts it."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


class TensorSpec(Protocol):
    """A tensor before it is there."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def requires_grad(self) -> bool: ...


class StagePlan(Protocol):
    """What crosses a stage's borders for inputs of one signature."""

    @property
    def is_last(self) -> bool: ...
    @property
    def incoming_specs(self) -> Sequence[TensorSpec]: ...
    @property
    def outgoing_specs(self) -> Sequence[TensorSpec]: ...


class Stage(Protocol):
    """What a rank holds of a model: one stage or several, each of which can be run on a micro-batch."""

    def plans(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[int, Any]:
        """The :class:`StagePlan` of each of this rank's stages for such inputs."""

    def forward(
        self,
        plan: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        received: Sequence[Tensor],
        key: int,
        recompute: bool,
    ) -> tuple[list[Tensor], Any]:
        """The tensors of ``plan.outgoing_specs``, and what the model returned on the last stage.

        Where ``recompute``, activations that need not be kept are not: the backward pass makes them again.
        """

    def recomputing(self, stage: int, key: int) -> AbstractContextManager[None]:
        """Wraps a stage's backward pass of the micro-batch with this key."""
