"""The executor's interface to the model's stages."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


class TensorMeta(Protocol):
    """Shape, dtype and differentiability of a tensor that does not exist yet."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def requires_grad(self) -> bool: ...


class StageIO(Protocol):
    """The tensors that a stage receives and sends, for inputs of one signature."""

    @property
    def is_last(self) -> bool: ...
    @property
    def incoming_specs(self) -> Sequence[TensorMeta]: ...
    @property
    def outgoing_specs(self) -> Sequence[TensorMeta]: ...


class PipelineStage(Protocol):
    """The stages of a model on one rank: one or several, each of which can run a micro-batch."""

    def plans(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[int, Any]:
        """The :class:`StageIO` of each of this rank's stages for such inputs."""

    def forward(
        self,
        plan: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        received: Sequence[Tensor],
        key: int,
        recompute: bool,
    ) -> tuple[list[Tensor], Any, Any]:
        """The tensors of ``plan.outgoing_specs``, the model's output (last stage), a context for ``recomputing``.

        With ``recompute``, activations are not stored where the backward pass can recompute them.
        """

    def recomputing(self, context: Any) -> AbstractContextManager[None]:
        """Wraps the backward pass of a forward that returned this context."""
