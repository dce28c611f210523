"""What a rank does for each kind of action."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from hybridpp.errors import ConfigError, ScheduleError
from hybridpp.pipeline.batch import call_arguments
from hybridpp.pipeline.boundary import Arrival, Departure
from hybridpp.pipeline.recorder import Recorder
from hybridpp.pipeline.separated import Note
from hybridpp.pipeline.stage import Stage
from hybridpp.pipeline.step import Step, StepResult
from hybridpp.pipeline.transport import Receipt, Sent, Transport
from hybridpp.pipeline.weight_gradients import WeightGradients
from hybridpp.schedule import Action, Kind, Program

_HALF = (torch.float16, torch.bfloat16)
_ADDS_TO_GRADIENTS = (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)


class _Graph(NamedTuple):
    """How to go back through a stage for one micro-batch."""

    arrival: Arrival
    departure: Departure | None
    loss: Tensor | None
    recomputes: bool


class Handlers:
    """One step of one rank: a handler per kind of action, and what is held between them.

    Everything that is held is under the action that will take it, so nothing outlives its use.
    """

    def __init__(
        self,
        stages: Stage,
        transport: Transport,
        device: torch.device,
        weight_gradients: WeightGradients,
        placement: tuple[int, ...],
        step: Step,
        recorder: Recorder,
    ):
        self.result = StepResult(len(step.microbatches), device)
        self._stages = stages
        self._transport = transport
        self._device = device
        self._weight_gradients = weight_gradients
        self._placement = placement
        self._step = step
        self._recorder = recorder
        # Planned up front and in order, so that every rank meets a new signature at the same point of its run.
        self._plans = [stages.plans(*call_arguments(microbatch.inputs)) for microbatch in step.microbatches]
        self._arriving: dict[Action, Receipt] = {}
        self._leaving: dict[Action, list[Tensor]] = {}
        self._sent: dict[Action, Sent] = {}
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._notes: dict[Action, list[Note]] = {}
        self._last: Action | None = None
        self._split: set[tuple[int, int | None]] = set()

    def by_kind(self) -> dict[Kind, Callable[[Action], None]]:
        """The handlers."""
        return {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT_GRADIENT: self._input_gradient,
            Kind.WEIGHT_GRADIENT: self._weight_gradient,
            Kind.SEND_ACTIVATION: self._send_activations,
            Kind.RECEIVE_ACTIVATION: self._receive_activations,
            Kind.SEND_GRADIENT: self._send_gradients,
            Kind.RECEIVE_GRADIENT: self._receive_gradients,
            Kind.REDUCE_GRADIENTS: self._reduce_gradients,
        }

    def expect(self, program: Program) -> None:
        """Get ready for a program: find the action after which this rank's gradients are complete."""
        self._split = {(stage, place) for stage, kind, place in program if kind is Kind.INPUT_GRADIENT}
        self._weight_gradients.begin(splits=bool(self._split))
        self._last = next((action for action in reversed(program) if action.kind in _ADDS_TO_GRADIENTS), None)

    def finish_send(self, action: Action) -> None:
        """Let go of what was sent: its peer has asked for it."""
        self._sent.pop(action).wait()

    def finish(self) -> None:
        """Wait until everything sent is away, and make sure that nothing is left over."""
        for sent in self._sent.values():
            sent.wait()
        left = [*self._arriving, *self._leaving, *self._notes]
        left += [Action(stage, Kind.BACKWARD, microbatch) for stage, microbatch in self._graphs]
        if left:
            raise ScheduleError(f"the program ended without {left[0]}. Check it with check_program.")

    def _is_here(self, stage: int) -> bool:
        return 0 <= stage < len(self._placement) and self._placement[stage] == self._transport.rank

    def _plan(self, action: Action) -> Any:
        return self._plans[action.microbatch or 0][action.stage]

    def _receive_activations(self, action: Action) -> None:
        peer = self._placement[action.stage - 1]
        specs = self._plan(action).incoming_specs
        self._arriving[action._replace(kind=Kind.FORWARD)] = self._transport.receive_activations(specs, peer)

    def _forward(self, action: Action) -> None:
        stage, _, place = action
        microbatch = place or 0
        plan, step = self._plan(action), self._step
        if (stage, microbatch) in self._graphs:
            raise ScheduleError(f"{action} runs again before its backward. Check the program with check_program.")
        tensors = self._take(self._arriving, action).wait() if stage else []
        self._recorder.start()
        arrival = Arrival(tensors, plan.incoming_specs, step.training)
        inputs = step.microbatches[microbatch].on(self._device)
        args, kwargs = call_arguments(inputs)
        num_stored = sum(not graph.recomputes for graph in self._graphs.values())
        recompute = step.training and num_stored >= step.max_stored_microbatches
        with self._weight_gradients.recorded((stage, place) in self._split) if step.training else nullcontext():
            key = step.keys[microbatch]
            tensors, outputs = self._stages.forward(plan, args, kwargs, arrival.values, key, recompute)
        loss = self._finish_forward(microbatch, outputs, inputs) if plan.is_last else None
        if step.training:
            departure = None if plan.is_last else Departure(tensors, plan.outgoing_specs)
            self._graphs[stage, microbatch] = _Graph(arrival, departure, loss, recompute)
        if plan.is_last:
            return
        if self._is_here(stage + 1):
            following = action._replace(stage=stage + 1)
            self._arriving[following] = Receipt([tensor.detach() for tensor in tensors])
        else:
            self._leaving[action._replace(kind=Kind.SEND_ACTIVATION)] = tensors

    def _finish_forward(self, microbatch: int, outputs: Any, inputs: Any) -> Tensor | None:
        """The end of the forward, on the last stage: keep loss and outputs; the loss to go back from."""
        # Putting a model's output together again takes longer than looking at it.
        if any(isinstance(leaf, Tensor) and leaf.dtype in _HALF for leaf in pytree.tree_leaves(outputs)):
            outputs = pytree.tree_map_only(Tensor, _widened, outputs)
        loss = None
        if self._step.criterion is not None:
            loss = self._loss(microbatch, outputs, inputs)
            if loss is not None:
                self.result.keep_loss(microbatch, loss)
        if self._step.keep_outputs:
            self.result.outputs[microbatch] = pytree.tree_map_only(Tensor, Tensor.detach, outputs)
        return loss

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

    def _send_activations(self, action: Action) -> None:
        tensors = self._take(self._leaving, action)
        self._sent[action] = self._transport.send_activations(tensors, self._placement[action.stage + 1])

    def _receive_gradients(self, action: Action) -> None:
        specs = [spec for spec in self._plan(action).outgoing_specs if spec.requires_grad]
        receipt = self._transport.receive_gradients(specs, self._placement[action.stage + 1])
        self._arriving[action._replace(kind=Kind.BACKWARD)] = receipt

    def _backward(self, action: Action) -> None:
        if action != self._last or not self._step.last_backward(None):
            with self._weight_gradients.at_once():
                self._go_back(action)
            return
        # In two parts, so that it is known when each gradient is complete, and its reduction can start.
        with self._weight_gradients.later(splits=False) as notes:
            self._go_back(action)
        self._weight_gradients.add(notes, final=True)

    def _input_gradient(self, action: Action) -> None:
        with self._weight_gradients.later(splits=True) as notes:
            self._go_back(action)
        self._notes[action._replace(kind=Kind.WEIGHT_GRADIENT)] = notes

    def _weight_gradient(self, action: Action) -> None:
        notes = self._take(self._notes, action)
        if action == self._last:
            self._step.last_backward({name for note in notes for name in note.call.names})
        self._weight_gradients.add(notes, final=action == self._last)

    def _go_back(self, action: Action) -> None:
        stage, _, place = action
        microbatch = place or 0
        arrival, departure, loss, _ = self._take(self._graphs, (stage, microbatch))
        received = [] if departure is None else self._take(self._arriving, action._replace(kind=Kind.BACKWARD)).wait()
        self._recorder.start()
        with self._stages.recomputing(stage, self._step.keys[microbatch]):
            if departure is not None:
                departure.backward(received)
            elif loss is not None:
                # From the edge: backward of a tensor takes torch's function modes away, which recomputation may need.
                weight = torch.full_like(loss, self._step.loss_weights[microbatch])
                torch.autograd.backward(get_gradient_edge(loss), weight)
        if not stage:
            return
        if self._is_here(stage - 1):
            before = Action(stage - 1, Kind.BACKWARD, microbatch)
            self._arriving[before] = Receipt(arrival.gradients())
        else:
            self._leaving[action._replace(kind=Kind.SEND_GRADIENT)] = arrival.gradients()

    def _send_gradients(self, action: Action) -> None:
        tensors = self._take(self._leaving, action)
        self._sent[action] = self._transport.send_gradients(tensors, self._placement[action.stage - 1])

    def _reduce_gradients(self, action: Action) -> None:
        # Stages of one rank share its gradients: they are complete after the last of them.
        if self._last is not None and action.stage == self._last.stage:
            self._step.reduce_gradients()

    def _take(self, held: dict[Any, Any], key: Any) -> Any:
        if key not in held:
            raise ScheduleError(f"{key} comes before what it needs, or twice. Check the program with check_program.")
        return held.pop(key)


def _widened(tensor: Tensor) -> Tensor:
    """Half-precision outputs in fp32, so that losses are computed in it."""
    return tensor.float() if tensor.dtype in _HALF else tensor
