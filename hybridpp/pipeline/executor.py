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

    Attributes:
        where: the action under way, for whoever must report a rank that hangs; None between steps, and after an error
            the action it happened in.
    """

    def __init__(self, stage: Stage, transport: Transport, device: torch.device):
        self.where: Action | None = None
        self._stage = stage
        self._transport = transport
        self._device = device

    def run(self, program: Program, step: Step) -> StepResult:
        """Do every action of ``program`` in order.

        Collective: every rank of the pipeline, with programs lowered from one schedule and the same micro-batches.
        """
        task = _Task(self._stage, self._transport, self._device, program, step)
        handlers = task.handlers()
        try:
            for action in program:
                self.where = action
                handlers[action.kind](action.microbatch)
            self._transport.drain()
        except BaseException as error:
            self._transport.abandon()
            error.add_note(f"hybridpp: in action {self.where} (stage, kind, micro-batch)")
            raise
        self.where = None
        return task.result


class _Task:
    """One run of one program."""

    def __init__(self, stage: Stage, transport: Transport, device: torch.device, program: Program, step: Step):
        self.result = StepResult()
        self._stage = stage
        self._transport = transport
        self._device = device
        self._step = step
        # Planned up front and in order, so that every rank meets a new signature at the same point of its run.
        self._in_flight = {
            place: _InFlight(stage.plan(*call_arguments(microbatch.inputs)))
            for place, microbatch in enumerate(step.microbatches)
        }
        self._last_backward = next(
            (action.microbatch for action in reversed(program) if action.kind is Kind.BACKWARD), None
        )

    def handlers(self) -> dict[Kind, Callable[[Any], None]]:
        return {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.SEND_ACTIVATION: self._send_activation,
            Kind.RECEIVE_ACTIVATION: self._receive_activation,
            Kind.SEND_GRADIENT: self._send_gradient,
            Kind.RECEIVE_GRADIENT: self._receive_gradient,
            Kind.REDUCE_GRADIENTS: lambda _: self._step.reduce_gradients(),
        }

    def _receive_activation(self, microbatch: int) -> None:
        held = self._in_flight[microbatch]
        held.activations = self._transport.receive_down(held.plan.incoming_specs)

    def _forward(self, microbatch: int) -> None:
        held = self._in_flight[microbatch]
        tensors = held.activations.wait() if held.activations else []
        held.activations = None
        held.arrival = Arrival(tensors, held.plan.incoming_specs, self._step.training)
        inputs = self._step.microbatches[microbatch].on(self._device)
        args, kwargs = call_arguments(inputs)
        key = self._step.keys[microbatch]
        held.to_send, outputs = self._stage.forward(held.plan, args, kwargs, held.arrival.values, key)
        if held.plan.is_last:
            self._finish(microbatch, held, outputs, inputs)
        elif self._step.training:
            held.departure = Departure(held.to_send, held.plan.outgoing_specs)
        if not self._step.training:
            held.arrival = None

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

    def _send_activation(self, microbatch: int) -> None:
        held = self._in_flight[microbatch]
        self._transport.send_down(held.to_send)
        held.to_send = []

    def _receive_gradient(self, microbatch: int) -> None:
        held = self._in_flight[microbatch]
        held.gradients = self._transport.receive_up([spec for spec in held.plan.outgoing_specs if spec.requires_grad])

    def _backward(self, microbatch: int) -> None:
        held = self._in_flight[microbatch]
        if microbatch == self._last_backward:
            self._step.last_backward()
        with self._stage.recomputing(self._step.keys[microbatch]):
            if held.departure is not None:
                held.departure.backward(held.gradients.wait() if held.gradients else [])
            elif held.loss is not None:
                torch.autograd.backward(held.loss * self._step.loss_weights[microbatch])
        # Everything of this micro-batch is freed here, but the gradients that still must travel.
        self._in_flight[microbatch] = _InFlight(held.plan, arrival=held.arrival)

    def _send_gradient(self, microbatch: int) -> None:
        arrival = self._in_flight[microbatch].arrival
        assert arrival is not None
        self._transport.send_up(arrival.gradients())
        self._in_flight[microbatch].arrival = None


def _widened(tensor: Tensor) -> Tensor:
    """Half-precision outputs in fp32, so that losses are computed in it."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
