"""One handler for each kind of action."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from hybridpp.errors import ConfigError, ScheduleError
from hybridpp.nn.deferred_tensor import MadeWhenRead, deferred
from hybridpp.nn.half import HALF_DTYPES
from hybridpp.nn.torch_private import pytree
from hybridpp.pipeline.batch import call_arguments
from hybridpp.pipeline.boundary import RecvHandle, SendHandle, StageInput, StageOutput, Transport
from hybridpp.pipeline.deferred_wgrad import WgradTask
from hybridpp.pipeline.forward_signature import describe_arguments
from hybridpp.pipeline.input_copies import InputCopies, StepInputs
from hybridpp.pipeline.recorder import Recorder
from hybridpp.pipeline.stage import PipelineStage
from hybridpp.pipeline.step import PipelineStep, StepResult
from hybridpp.pipeline.weight_gradients import WeightGradients
from hybridpp.schedule import Action, ActionKind, Program

_ADDS_TO_GRADIENTS = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)


class _Graph(NamedTuple):
    """What the backward pass of a stage needs, for one micro-batch."""

    stage_input: StageInput
    stage_output: StageOutput | None
    loss: Tensor | None
    recomputes: bool
    context: Any


class Handlers:
    """One step of one rank: a handler for each kind of action, and the tensors held between actions.

    Held tensors are keyed by the action that will consume them, so none outlives its use.
    """

    def __init__(
        self,
        stages: PipelineStage,
        transport: Transport,
        device: torch.device,
        weight_gradients: WeightGradients,
        placement: tuple[int, ...],
        step: PipelineStep,
        recorder: Recorder | None,
        inputs: InputCopies,
    ):
        num_microbatches = len(step.microbatches)
        losses = torch.zeros(num_microbatches, dtype=torch.float64, device=device)
        self.result = StepResult(losses, [False] * num_microbatches, {})
        self._stages = stages
        self._transport = transport
        self._device = device
        self._weight_gradients = weight_gradients
        self._placement = placement
        self._step = step
        self._recorder = recorder
        is_cut = len(placement) > 1
        self._inputs = StepInputs(inputs, step.microbatches, step.training, is_cut)
        # Planned before the first action and in order, so that every rank traces a new signature at the same point.
        self._plans = [stages.plans(*self._call(microbatch.inputs)) for microbatch in step.microbatches]
        self._arriving: dict[Action, RecvHandle] = {}
        self._leaving: dict[Action, list[Tensor]] = {}
        self._sent: dict[Action, SendHandle] = {}
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._wgrad_tasks: dict[Action, list[WgradTask]] = {}
        self._last: Action | None = None
        self._split: set[tuple[int, int | None]] = set()
        # Whether any weight gradient is deferred.
        self._defers = weight_gradients.is_always_needed

    def by_kind(self) -> dict[ActionKind, Callable[[Action], None]]:
        """The handler of each kind of action."""
        return {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.INPUT_GRADIENT: self._input_gradient,
            ActionKind.WEIGHT_GRADIENT: self._weight_gradient,
            ActionKind.SEND_ACTIVATION: self._send_activations,
            ActionKind.RECEIVE_ACTIVATION: self._receive_activations,
            ActionKind.SEND_GRADIENT: self._send_gradients,
            ActionKind.RECEIVE_GRADIENT: self._receive_gradients,
            ActionKind.REDUCE_GRADIENTS: self._reduce_gradients,
        }

    def expect(self, program: Program) -> None:
        """Prepare for a program: find the action after which this rank's gradients are complete."""
        forwards = [(stage, place or 0) for stage, kind, place in program if kind is ActionKind.FORWARD]
        self._inputs.expect(forwards)
        self._split = {(stage, place) for stage, kind, place in program if kind is ActionKind.INPUT_GRADIENT}
        self._defers = bool(self._split) or self._weight_gradients.is_always_needed
        if self._defers:
            self._weight_gradients.begin(splits=bool(self._split))
        self._last = next((action for action in reversed(program) if action.kind in _ADDS_TO_GRADIENTS), None)

    def finish_send(self, action: Action) -> None:
        """Release sent tensors, whose receive the peer has posted."""
        self._sent.pop(action).wait()

    def finish(self) -> None:
        """Wait for the remaining sends, and check that no held tensor is left.

        Raises:
            ScheduleError: the program lacks an action.
        """
        for sent in self._sent.values():
            sent.wait()
        left = [*self._arriving, *self._leaving, *self._wgrad_tasks]
        left += [Action(stage, ActionKind.BACKWARD, microbatch) for stage, microbatch in self._graphs]
        if left:
            raise ScheduleError(f"the program lacks {left[0]}. Check it with check_program.")

    def _call(self, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return call_arguments(self._step.model_inputs(inputs))

    def _is_here(self, stage: int) -> bool:
        return 0 <= stage < len(self._placement) and self._placement[stage] == self._transport.rank

    def _plan(self, action: Action) -> Any:
        return self._plans[action.microbatch or 0][action.stage]

    def _receive_activations(self, action: Action) -> None:
        peer = self._placement[action.stage - 1]
        specs = self._plan(action).incoming_specs
        self._arriving[action._replace(kind=ActionKind.FORWARD)] = self._transport.receive(specs, peer)

    def _forward(self, action: Action) -> None:
        stage, _, place = action
        microbatch = place or 0
        plan, step = self._plan(action), self._step
        if (stage, microbatch) in self._graphs:
            raise ScheduleError(f"{action} runs again before its backward. Check the program with check_program.")
        tensors = self._take(self._arriving, action).wait() if stage else []
        if self._recorder is not None:
            self._recorder.start()
        stage_input = StageInput(tensors, plan.incoming_specs, step.training)
        inputs = self._inputs.take(stage, microbatch)
        args, kwargs = self._call(inputs)
        num_stored = sum(not graph.recomputes for graph in self._graphs.values())
        recompute = step.training and num_stored >= step.max_stored_microbatches
        defers = self._defers and step.training
        with self._weight_gradients.recording_forward((stage, place) in self._split) if defers else nullcontext():
            key = step.keys[microbatch]
            try:
                found = self._stages.forward(plan, args, kwargs, stage_input.take_values(), key, recompute)
            except Exception as error:
                error.add_note(f"hybridpp: in model(*{describe_arguments(args)}, **{describe_arguments(kwargs)})")
                raise
        tensors, outputs, context = found
        loss = self._finish_forward(microbatch, outputs, inputs) if plan.is_last else None
        if step.training:
            stage_output = None if plan.is_last else StageOutput(tensors, plan.outgoing_specs)
            self._graphs[stage, microbatch] = _Graph(stage_input, stage_output, loss, recompute, context)
        if plan.is_last:
            return
        if self._is_here(stage + 1):
            following = action._replace(stage=stage + 1)
            self._arriving[following] = RecvHandle([tensor.detach() for tensor in tensors])
        else:
            self._leaving[action._replace(kind=ActionKind.SEND_ACTIVATION)] = tensors

    def _finish_forward(self, microbatch: int, outputs: Any, inputs: Any) -> Tensor | None:
        """On the last stage, compute and keep the loss, and keep the outputs; the loss to start the backward from."""
        # Checking the leaves first is cheaper than rebuilding the output.
        if any(isinstance(leaf, Tensor) and leaf.dtype in HALF_DTYPES for leaf in pytree.tree_leaves(outputs)):
            outputs = pytree.tree_map_only(Tensor, _widened_when_read, outputs)
        loss = None
        if self._step.criterion is not None:
            loss = self._loss(microbatch, outputs, inputs)
            if loss is not None:
                self.result.losses[microbatch] = loss.detach()
                self.result.has_loss[microbatch] = True
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
        if self._step.look_at_loss is not None:
            self._step.look_at_loss(microbatch, loss, outputs, inputs)
        if self._step.training and not loss.requires_grad:
            raise ConfigError(
                "the loss does not depend on any trainable parameter, so there is nothing to train. "
                "Unfreeze a parameter, do not detach the outputs, or call execute_pipeline under torch.no_grad()."
            )
        return loss.to(torch.promote_types(loss.dtype, torch.float32)).reshape(())

    def _send_activations(self, action: Action) -> None:
        tensors = self._take(self._leaving, action)
        self._sent[action] = self._transport.send(tensors, self._placement[action.stage + 1])

    def _receive_gradients(self, action: Action) -> None:
        specs = [spec for spec in self._plan(action).outgoing_specs if spec.requires_grad]
        handle = self._transport.receive(specs, self._placement[action.stage + 1])
        self._arriving[action._replace(kind=ActionKind.BACKWARD)] = handle

    def _backward(self, action: Action) -> None:
        is_observed = action == self._last and self._step.begin_last_backward(None)
        if not self._defers:
            self._go_back(action)
        elif not is_observed:
            with self._weight_gradients.full_backward():
                self._go_back(action)
        else:
            # Input gradients first, then weight gradients one by one, so that each reduction can start when its
            # gradient is
            # complete.
            with self._weight_gradients.input_backward(splits=False) as tasks:
                self._go_back(action)
            self._weight_gradients.add(tasks, final=True)
        self._step.end_backward()

    def _input_gradient(self, action: Action) -> None:
        with self._weight_gradients.input_backward(splits=True) as tasks:
            self._go_back(action)
        self._step.end_backward()
        self._wgrad_tasks[action._replace(kind=ActionKind.WEIGHT_GRADIENT)] = tasks

    def _weight_gradient(self, action: Action) -> None:
        tasks = self._take(self._wgrad_tasks, action)
        if action == self._last:
            self._step.begin_last_backward({name for task in tasks for name in task.binding.names})
        self._weight_gradients.add(tasks, final=action == self._last)
        self._step.end_backward()

    def _go_back(self, action: Action) -> None:
        stage, _, place = action
        microbatch = place or 0
        stage_input, stage_output, loss, _, context = self._take(self._graphs, (stage, microbatch))
        received = (
            [] if stage_output is None else self._take(self._arriving, action._replace(kind=ActionKind.BACKWARD)).wait()
        )
        if self._recorder is not None:
            self._recorder.start()
        with self._stages.recomputing(context):
            if stage_output is not None:
                stage_output.backward(received)
            elif loss is not None:
                # From the edge: backward of a tensor disables torch's function modes, which recomputation may need.
                weight = torch.full_like(loss, self._step.loss_weights[microbatch])
                torch.autograd.backward(get_gradient_edge(loss), weight)
        if not stage:
            return
        if self._is_here(stage - 1):
            before = Action(stage - 1, ActionKind.BACKWARD, microbatch)
            self._arriving[before] = RecvHandle(stage_input.gradients())
        else:
            self._leaving[action._replace(kind=ActionKind.SEND_GRADIENT)] = stage_input.gradients()

    def _send_gradients(self, action: Action) -> None:
        tensors = self._take(self._leaving, action)
        self._sent[action] = self._transport.send(tensors, self._placement[action.stage - 1])

    def _reduce_gradients(self, action: Action) -> None:
        # Stages of one rank share its gradients: they are complete after the last of them.
        if self._last is not None and action.stage == self._last.stage:
            self._step.reduce_gradients()

    def _take(self, held: dict[Any, Any], key: Any) -> Any:
        if key not in held:
            raise ScheduleError(
                f"{key} runs before its inputs exist, or a second time. Check the program with check_program."
            )
        return held.pop(key)


def _widened_when_read(output: Tensor) -> Tensor:
    """An output in fp32 if it is in half precision. Logits are large, and most criteria read only the model's loss."""
    if output.dtype not in HALF_DTYPES:
        return output
    is_known = isinstance(output, MadeWhenRead) or (type(output) is Tensor and output.layout is torch.strided)
    if output.dim() == 0 or not is_known:
        return output.float()
    return deferred(output, output.float, dtype=torch.float32, device=output.device)
