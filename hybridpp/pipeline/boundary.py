"""The inputs and outputs of a stage in autograd: received values with their gradients, and sent values."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hybridpp.pipeline.stage import TensorMeta


class _StageInputFunction(torch.autograd.Function):
    """Makes received tensors the results of an operation, so that the model may write to them in place.

    Autograd forbids in-place writes to a leaf that requires a gradient, and a stage may begin with one (an in-place
    activation). The tensors are passed in a list, which autograd does not inspect, so the results are not views.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensors: list[Tensor], gradients: list[Tensor | None]) -> tuple[Tensor, ...]:
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.gradients.extend(gradients)
        return None, None, None


class StageInput:
    """The values that a stage received for one micro-batch.

    Attributes:
        values: the tensors for the model, in the order of the specs.
    """

    def __init__(self, tensors: list[Tensor], specs: Sequence[TensorMeta], training: bool):
        self._specs = [spec for spec in specs if training and spec.requires_grad]
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._gradients: list[Tensor | None] = []
        tracked = [tensor for tensor, spec in zip(tensors, specs, strict=True) if training and spec.requires_grad]
        if tracked:
            anchor = torch.zeros((), requires_grad=True)
            tracked = list(_StageInputFunction.apply(anchor, tracked, self._gradients))  # type: ignore[no-untyped-call]  # torch
        ready = iter(tracked)
        self.values = [
            next(ready) if training and spec.requires_grad else tensor
            for tensor, spec in zip(tensors, specs, strict=True)
        ]

    def gradients(self) -> list[Tensor]:
        """The gradients of the differentiable values, after the backward pass; zeros for values without an effect."""
        found = self._gradients or [None] * len(self._specs)
        return [
            torch.zeros(spec.shape, dtype=spec.dtype, device=self._device) if gradient is None else gradient
            for gradient, spec in zip(found, self._specs, strict=True)
        ]


class StageOutput:
    """The values that a stage sent for one micro-batch; it keeps their autograd edges, not the values."""

    def __init__(self, tensors: list[Tensor], specs: Sequence[TensorMeta]):
        # The gradient of a value that was traced as differentiable but is not (a unit under no_grad) is dropped.
        self._edges: list[GradientEdge | None] = [
            get_gradient_edge(tensor) if tensor.requires_grad else None
            for tensor, spec in zip(tensors, specs, strict=True)
            if spec.requires_grad
        ]

    def backward(self, gradients: list[Tensor]) -> None:
        """Run the stage's backward pass, given a gradient for each value that was traced as differentiable."""
        pairs = [(edge, grad) for edge, grad in zip(self._edges, gradients, strict=True) if edge is not None]
        if pairs:
            torch.autograd.backward([edge for edge, _ in pairs], [grad for _, grad in pairs])
