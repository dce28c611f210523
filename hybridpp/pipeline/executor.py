"""Run a lowered schedule: one loop over the rank's actions, one handler per kind."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hybridpp.errors import ConfigError
from hybridpp.pipeline.batch import Microbatch, call_arguments
from hybridpp.pipeline.boundary import Arrival, Departure
from hybridpp.pipeline.stage import Stage
from hybridpp.pipeline.transport import Receipt, Transport
from hybridpp.schedule import Action, Kind, Program

Criterion = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One batch to run.

    Attributes:
        microbatches: the batch's parts, the same on every rank of the pipeline.
        loss_weights: factor on each micro-batch's loss in the gradient, loss scale included.
        keys: each micro-batch's key for random numbers.
        criterion: ``criterion(outputs, inputs)`` gives a scalar; None where no loss is asked for.
        training: whether to run backward.
        keep_outputs: whether the last stage keeps the model's outputs.
        last_backward: called before a stage's last backward: its gradients become final in it.
        reduce_gradients: called after it.
    """

    microbatches: Sequence[Microbatch]
    loss_weights: Sequence[float]
    keys: Sequence[int]
    criterion: Criterion | None
    training: bool
    keep_outputs: bool
    last_backward: Callable[[], None]
    reduce_gradients: Callable[[], None]


@dataclass
class StepResult:
    """What a step gave on this rank; both empty except on the last stage.

    Attributes:
        losses: detached fp32 scalars, by micro-batch; None for one that holds no items.
        outputs: what the model returned, detached, by micro-batch.
    """

    losses: dict[int, Tensor | None] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)


@dataclass
class _InFlight:
    """What a stage holds of one micro-batch between its actions."""

    plan: Any
    activations: Receipt | None = None
    gradients: Receipt | None = None
    arrival: Arrival | None = None
    departure: Departure | None = None
    to_send: list[Tensor] = field(default_factory=list)
    loss: Tensor | None = None


class Executor:
    """Runs programs on one rank.

    Args:
        stages: what the rank holds of the model.
        transport: to the other ranks.
        device: where the micro-batches go.
        placement: the rank (its place in the pipeline's group) of every stage.

    Attributes:
        where: the action under way, for whoever must report a rank that hangs; None between steps, and after an error
            the action it happened in.
    """

    def __init__(self, stages: Stage, transport: Transport, device: torch.device, placement: Sequence[int]):
        self.where: Action | None = None
        self._stages = stages
        self._transport = transport
        self._device = device
        self._placement = tuple(placement)

    def run(self, program: Program, step: Step) -> StepResult:
        """Do every action of ``program`` in order.

        Collective: every rank of the pipeline, with programs lowered from one schedule and the same micro-batches.
        """
        task = _Task(self._stages, self._transport, self._device, self._placement, program, step)
        handlers = task.handlers()
        try:
            for action in program:
                self.where = action
                handlers[action.kind](action)
            self._transport.drain()
        except BaseException as error:
            self._transport.abandon()
            error.add_note(f"hybridpp: in action {self.where} (stage, kind, micro-batch)")
            raise
        self.where = None
        return task.result


class _Task:
    """One run of one program."""

    def __init__(
        self,
        stages: Stage,
        transport: Transport,
        device: torch.device,
        placement: tuple[int, ...],
        program: Program,
        step: Step,
    ):
        self.result = StepResult()
        self._stages = stages
        self._transport = transport
        self._device = device
        self._placement = placement
        self._step = step
        # Planned up front and in order, so that every rank meets a new signature at the same point of its run.
        self._in_flight = {
            (stage, place): _InFlight(stages.plan(stage, *call_arguments(microbatch.inputs)))
            for place, microbatch in enumerate(step.microbatches)
            for stage in sorted({action.stage for action in program})
        }
        self._last_backward = next((action for action in reversed(program) if action.kind is Kind.BACKWARD), None)

    def handlers(self) -> dict[Kind, Callable[[Action], None]]:
        return {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.SEND_ACTIVATION: self._send_activation,
            Kind.RECEIVE_ACTIVATION: self._receive_activation,
            Kind.SEND_GRADIENT: self._send_gradient,
            Kind.RECEIVE_GRADIENT: self._receive_gradient,
            Kind.REDUCE_GRADIENTS: self._reduce_gradients,
        }

    def _held(self, action: Action, step: int = 0) -> _InFlight:
        """What is held for the action's micro-batch by its stage, or by the one ``step`` further."""
        return self._in_flight[action.stage + step, action.microbatch or 0]

    def _is_here(self, stage: int) -> bool:
        return (stage, 0) in self._in_flight

    def _receive_activation(self, action: Action) -> None:
        held = self._held(action)
        peer = self._placement[action.stage - 1]
        held.activations = self._transport.receive_down(held.plan.incoming_specs, peer)

    def _forward(self, action: Action) -> None:
        held = self._held(action)
        microbatch = action.microbatch or 0
        tensors = held.activations.wait() if held.activations else []
        held.activations = None
        held.arrival = Arrival(tensors, held.plan.incoming_specs, self._step.training)
        inputs = self._step.microbatches[microbatch].on(self._device)
        args, kwargs = call_arguments(inputs)
        key = self._step.keys[microbatch]
        held.to_send, outputs = self._stages.forward(held.plan, args, kwargs, held.arrival.values, key)
        if held.plan.is_last:
            self._finish(microbatch, held, outputs, inputs)
        elif self._step.training:
            held.departure = Departure(held.to_send, held.plan.outgoing_specs)
        if not self._step.training:
            held.arrival = None
        if not held.plan.is_last and self._is_here(action.stage + 1):
            self._held(action, 1).activations = Receipt([tensor.detach() for tensor in held.to_send])
            held.to_send = []

    def _finish(self, microbatch: int, held: _InFlight, outputs: Any, inputs: Any) -> None:
        """The end of the forward, on the last stage: loss and outputs."""
        outputs = pytree.tree_map_only(Tensor, _widened, outputs)
        if self._step.criterion is not None:
            held.loss = self._loss(microbatch, outputs, inputs)
            self.result.losses[microbatch] = None if held.loss is None else held.loss.detach()
        if self._step.keep_outputs:
            self.result.outputs[microbatch] = pytree.tree_map_only(Tensor, Tensor.detach, outputs)

    def _loss(self, microbatch: int, outputs: Any, inputs: Any) -> Tensor | None:
        if self._step.microbatches[microbatch].share == 0:
            return None
        assert self._step.criterion is not None
        loss = self._step.criterion(outputs, inputs)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(
                f"criterion(outputs, inputs) must return a scalar tensor: got {got}. Return the mean loss of the "
                "micro-batch."
            )
        if self._step.training and not loss.requires_grad:
            raise ConfigError(
                "the criterion's result does not depend on anything trainable, so there is nothing to train. "
                "Unfreeze a parameter, do not detach the outputs, or call execute_pipeline under torch.no_grad()."
            )
        return loss.float().reshape(())

    def _send_activation(self, action: Action) -> None:
        held = self._held(action)
        self._transport.send_down(held.to_send, self._placement[action.stage + 1])
        held.to_send = []

    def _receive_gradient(self, action: Action) -> None:
        held = self._held(action)
        specs = [spec for spec in held.plan.outgoing_specs if spec.requires_grad]
        held.gradients = self._transport.receive_up(specs, self._placement[action.stage + 1])

    def _backward(self, action: Action) -> None:
        held = self._held(action)
        microbatch = action.microbatch or 0
        if action == self._last_backward:
            self._step.last_backward()
        with self._stages.recomputing(action.stage, self._step.keys[microbatch]):
            if held.departure is not None:
                held.departure.backward(held.gradients.wait() if held.gradients else [])
            elif held.loss is not None:
                torch.autograd.backward(held.loss * self._step.loss_weights[microbatch])
        # Everything of this micro-batch is freed here, but the gradients that still must travel.
        arrival = held.arrival
        self._in_flight[action.stage, microbatch] = _InFlight(held.plan, arrival=arrival)
        if action.stage and self._is_here(action.stage - 1) and arrival is not None:
            self._held(action, -1).gradients = Receipt(arrival.gradients())

    def _send_gradient(self, action: Action) -> None:
        held = self._held(action)
        assert held.arrival is not None
        self._transport.send_up(held.arrival.gradients(), self._placement[action.stage - 1])
        held.arrival = None

    def _reduce_gradients(self, action: Action) -> None:
        # Stages of one rank share its gradients: they are complete after the last of them.
        if self._last_backward is not None and action.stage == self._last_backward.stage:
            self._step.reduce_gradients()


def _widened(tensor: Tensor) -> Tensor:
    """Half-precision outputs in fp32, so that losses are computed in it."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
