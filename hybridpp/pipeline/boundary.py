"""What crosses the boundary between two stages: messages, and their ends in autograd."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hybridpp.cluster import Group, Work, resolved
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
    """The values that a stage received for one micro-batch; it keeps their gradients, not the values."""

    def __init__(self, tensors: list[Tensor], specs: Sequence[TensorMeta], training: bool):
        self._specs = [spec for spec in specs if training and spec.requires_grad]
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._gradients: list[Tensor | None] = []
        tracked = [tensor for tensor, spec in zip(tensors, specs, strict=True) if training and spec.requires_grad]
        if tracked:
            anchor = torch.zeros((), requires_grad=True)
            tracked = list(_StageInputFunction.apply(anchor, tracked, self._gradients))  # type: ignore[no-untyped-call]  # torch
        ready = iter(tracked)
        self._values = [
            next(ready) if training and spec.requires_grad else tensor
            for tensor, spec in zip(tensors, specs, strict=True)
        ]

    def take_values(self) -> list[Tensor]:
        """The tensors for the model, in the order of the specs; call it once. Autograd keeps what it needs of them."""
        values, self._values = self._values, []
        return values

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


class RecvHandle:
    """Tensors that this rank receives from another rank, or gets from another stage on the same rank."""

    __slots__ = ("_tensors", "_works")

    def __init__(self, tensors: list[Tensor], works: Sequence[Work] = ()):
        self._tensors = tensors
        self._works = works

    def wait(self) -> list[Tensor]:
        """The tensors, after they have arrived."""
        for work in self._works:
            work.wait()
        self._works = ()
        return self._tensors


class SendHandle:
    """Tensors that this rank sends, which must stay alive until they have been sent."""

    __slots__ = ("_tensors", "_works")

    def __init__(self, tensors: list[Tensor], works: list[Work]):
        self._tensors = tensors
        self._works = works

    def wait(self) -> None:
        """Wait until the tensors are sent, then release them. Blocks until the peer has posted the receive."""
        for work in self._works:
            work.wait()
        self._tensors, self._works = [], []


class Transport:
    """Sends and receives lists of tensors whose shapes both sides know.

    Messages between two ranks arrive in the order in which they are sent, activations and gradients alike, so both
    ranks must start them in one order (:func:`~hybridpp.schedule.lower`).

    Args:
        group: the pipeline's ranks.
        device: of received tensors.
    """

    def __init__(self, group: Group, device: torch.device):
        self.rank = group.rank
        self._group, self._device = group, device

    def send(self, tensors: Sequence[Tensor], peer: int) -> SendHandle:
        """Start to send to rank ``peer``."""
        # Backends send contiguous memory only, as it is.
        dense = [resolved(tensor.detach()).contiguous() for tensor in tensors]
        return SendHandle(dense, [self._group.send(tensor, peer) for tensor in dense])

    def receive(self, specs: Sequence[TensorMeta], peer: int) -> RecvHandle:
        """Start to receive from rank ``peer``."""
        tensors = [torch.empty(spec.shape, dtype=spec.dtype, device=self._device) for spec in specs]
        return RecvHandle(tensors, [self._group.receive(tensor, peer) for tensor in tensors])
