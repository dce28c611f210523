"""What crosses the boundary between two stages: messages, their ends in autograd, and what is held until it is used."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hybridpp.cluster import Group, Work, resolved
from hybridpp.errors import ScheduleError
from hybridpp.pipeline.stage import TensorMeta
from hybridpp.schedule import Action, ActionKind

K = TypeVar("K")
V = TypeVar("V")

# By the kind of a receive, the action that uses what arrives. By the kind of a message, from this stage to the peer's.
_USER = {ActionKind.RECEIVE_ACTIVATION: ActionKind.FORWARD, ActionKind.RECEIVE_GRADIENT: ActionKind.BACKWARD}
_PEER = {
    ActionKind.RECEIVE_ACTIVATION: -1,
    ActionKind.SEND_ACTIVATION: 1,
    ActionKind.RECEIVE_GRADIENT: 1,
    ActionKind.SEND_GRADIENT: -1,
}


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


class StageMessages:
    """The activations and gradients of one rank's stages in a step, from the action that makes them to their use.

    They are held under the action that will use them, so none outlives its use. Stages of one rank hand over without a
    message.

    Args:
        transport: to the other ranks.
        placement: the rank of every stage, as an index into the pipeline's group.
    """

    def __init__(self, transport: Transport, placement: Sequence[int]):
        self._transport, self._placement = transport, placement
        self._arriving: dict[Action, RecvHandle] = {}
        self._leaving: dict[Action, list[Tensor]] = {}
        self._sent: dict[Action, SendHandle] = {}

    def receive(self, action: Action, specs: Sequence[TensorMeta]) -> None:
        """Start a receive action."""
        peer = self._placement[action.stage + _PEER[action.kind]]
        self._arriving[action._replace(kind=_USER[action.kind])] = self._transport.receive(specs, peer)

    def send(self, action: Action) -> None:
        """Start a send action, of what the stage has passed on."""
        peer = self._placement[action.stage + _PEER[action.kind]]
        tensors = take_held(self._leaving, action)
        self._sent[action] = self._transport.send(tensors, peer)

    def take(self, action: Action) -> list[Tensor]:
        """What has come for a forward or a backward."""
        return take_held(self._arriving, action).wait()

    def pass_activations(self, action: Action, tensors: list[Tensor]) -> None:
        """Pass the results of a forward on to the next stage."""
        if self._is_here(action.stage + 1):
            following = action._replace(stage=action.stage + 1)
            self._arriving[following] = RecvHandle([tensor.detach() for tensor in tensors])
        else:
            self._leaving[action._replace(kind=ActionKind.SEND_ACTIVATION)] = tensors

    def pass_gradients(self, action: Action, gradients: list[Tensor]) -> None:
        """Pass the gradients of a stage's inputs, of a backward or an input gradient, on to the previous stage."""
        if self._is_here(action.stage - 1):
            before = Action(action.stage - 1, ActionKind.BACKWARD, action.microbatch)
            self._arriving[before] = RecvHandle(gradients)
        else:
            self._leaving[action._replace(kind=ActionKind.SEND_GRADIENT)] = gradients

    def _is_here(self, stage: int) -> bool:
        return 0 <= stage < len(self._placement) and self._placement[stage] == self._transport.rank

    def finish_send(self, action: Action) -> None:
        """Release sent tensors, whose receive the peer has posted."""
        self._sent.pop(action).wait()

    def finish(self) -> list[Action]:
        """Wait for the remaining sends; returns the actions that lack, whose tensors are still held."""
        for sent in self._sent.values():
            sent.wait()
        return [*self._arriving, *self._leaving]


def take_held(held: dict[K, V], key: K) -> V:
    """Take what is held for an action.

    Raises:
        ScheduleError: nothing is.
    """
    if key not in held:
        raise ScheduleError(
            f"{key} runs before its inputs exist, or a second time. Check the program with check_program."
        )
    return held.pop(key)
