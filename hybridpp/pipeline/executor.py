"""Run a lowered schedule: a loop over the rank's actions, and a handler for each kind of action."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from hybridpp.errors import ScheduleError
from hybridpp.module_adapter import ModuleAdapter
from hybridpp.pipeline.batch import call_arguments
from hybridpp.pipeline.boundary import (
    InputCopies,
    StageInput,
    StageMessages,
    StageOutput,
    StepInputs,
    Transport,
    take_held,
)
from hybridpp.pipeline.criterion import MicrobatchLosses
from hybridpp.pipeline.deferred_wgrad import WgradTask
from hybridpp.pipeline.device_marks import DeviceMarks
from hybridpp.pipeline.forward_signature import describe_arguments
from hybridpp.pipeline.rank_program import RankProgram
from hybridpp.pipeline.recorder import Recorder
from hybridpp.pipeline.rest_of_step import RestOfStep
from hybridpp.pipeline.stage import PipelineStage
from hybridpp.pipeline.step import PipelineStep, StepResult
from hybridpp.pipeline.weight_gradients import WeightGradients
from hybridpp.schedule import Action, ActionKind, Program

_ADDS_TO_GRADIENTS = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)


def _nothing(_: StepResult) -> None:
    pass


def reduced_after(program: Program) -> set[Action]:
    """The actions after which the gradients of a stage are reduced: the last that adds to them, or each."""
    adding = [action for action in program if action.kind in _ADDS_TO_GRADIENTS]
    each = {(stage, microbatch) for stage, kind, microbatch in program if kind is ActionKind.REDUCE_GRADIENTS}
    found = {action for action in adding if (action.stage, action.microbatch) in each}
    return found | set({action.stage: action for action in adding}.values())


class Executor:
    """Runs programs on one rank.

    Args:
        stages: the model's stages on this rank.
        transport: to the other ranks of the pipeline.
        device: where to run the micro-batches.
        weight_gradients: of the model; None: no layer's weight gradient can be deferred.
        around: a context to run a program in.

    Attributes:
        where: the current action, to report when a rank hangs. None between steps; after an error, the action that
            raised it, or None if none had begun.
        marks: of actions on the device, for a watchdog; None: there are none.
        rest: of the last program, if an error ended it; else None.
    """

    def __init__(
        self,
        stages: PipelineStage,
        transport: Transport,
        device: torch.device,
        weight_gradients: WeightGradients | None = None,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        self.where: Action | None = None
        self.marks: DeviceMarks | None = None
        self.rest: RestOfStep | None = None
        self._position, self._has_passed = 0, False
        self._step: PipelineStep | None = None
        self._stages = stages
        self._transport = transport
        self._device = device
        self._weight_gradients = weight_gradients or WeightGradients(ModuleAdapter(nn.Module()))
        self._around = around
        self._inputs = InputCopies(device)

    @property
    def gradient_scale(self) -> float:
        """The factor on the loss of the micro-batch whose pass runs, in its gradient; 1.0 where none runs."""
        if self._step is None or self.where is None or not self._step.training:
            return 1.0
        return self._step.loss_weights[self.where.microbatch or 0]

    def run(
        self,
        program: RankProgram,
        step: PipelineStep,
        recorder: Recorder | None = None,
        losses_known: Callable[[StepResult], None] = _nothing,
    ) -> StepResult:
        """Run every action of ``program`` in order.

        Collective: every rank of the pipeline, with programs of one schedule and the same micro-batches.

        Args:
            program: this rank's.
            step: the batch.
            recorder: records when each action ran; None: nothing is recorded.
            losses_known: called once, with the result so far, when this rank has computed all losses; on a rank that
                computes none, before the first action.

        Raises:
            ScheduleError: the program runs an action before its inputs exist, twice, or not at all.
        """
        self.where, self.rest = None, None
        self._position, self._has_passed = 0, False
        self._step = step
        try:
            return self._run_all(program, step, recorder, losses_known)
        except Exception:
            self.rest = RestOfStep(
                program.actions,
                self._position,
                step,
                reduced_after=reduced_after(program.actions),
                has_passed=self._has_passed,
            )
            raise
        finally:
            self._step = None

    def _run_all(
        self,
        program: RankProgram,
        step: PipelineStep,
        recorder: Recorder | None,
        losses_known: Callable[[StepResult], None],
    ) -> StepResult:
        is_cut = len(program.placement) > 1
        handlers = _Handlers(
            self._stages,
            self._weight_gradients,
            step,
            recorder,
            losses=MicrobatchLosses(step, self._device),
            inputs=StepInputs(self._inputs, step.microbatches, step.training, is_cut),
            messages=StageMessages(self._transport, program.placement),
        )
        handlers.expect(program.actions)
        if self.marks is not None:
            self.marks.begin(program.placement, self._transport.rank)
        actions = list(zip(program.actions, program.completed_sends, strict=True))
        try:
            with self._around():
                self._run(actions[: program.losses_after], handlers, recorder)
                losses_known(handlers.losses.result)
                self._run(actions[program.losses_after :], handlers, recorder)
                handlers.finish()
        except BaseException as error:
            error.add_note(f"hybridpp: in action {self.where} (stage, kind, micro-batch)")
            raise
        self.where = None
        return handlers.losses.result

    def _run(
        self, actions: list[tuple[Action, tuple[Action, ...]]], handlers: "_Handlers", recorder: Recorder | None
    ) -> None:
        """Run actions, each with the sends that are complete by then."""
        handler_of_kind = handlers.by_kind()
        for action, completed_sends in actions:
            self.where = action
            for send in completed_sends:
                handlers.messages.finish_send(send)
            if recorder is not None:
                recorder.start()
            try:
                handler_of_kind[action.kind](action)
            except Exception:
                self._has_passed = handlers.passed == action
                raise
            self._position += 1
            if self.marks is not None:
                self.marks.add(action)
            if recorder is not None:
                recorder.end(action)


class _Graph(NamedTuple):
    """What the backward pass of a stage needs, for one micro-batch."""

    stage_input: StageInput
    stage_output: StageOutput | None
    loss: Tensor | None
    recomputes: bool
    context: Any


class _Handlers:
    """One step of one rank: a handler for each kind of action, and what is held between actions.

    What is held is keyed by the action that will use it, so nothing outlives its use.
    """

    def __init__(
        self,
        stages: PipelineStage,
        weight_gradients: WeightGradients,
        step: PipelineStep,
        recorder: Recorder | None,
        *,
        losses: MicrobatchLosses,
        inputs: StepInputs,
        messages: StageMessages,
    ):
        self.losses, self.messages = losses, messages
        # The last action whose forward or backward pass has ended.
        self.passed: Action | None = None
        self._stages, self._weight_gradients = stages, weight_gradients
        self._step, self._recorder, self._inputs = step, recorder, inputs
        # Planned before the first action and in order, so that every rank traces a new signature at the same point.
        self._plans = [stages.plans(*self._call(microbatch.inputs)) for microbatch in step.microbatches]
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._wgrad_tasks: dict[Action, list[WgradTask]] = {}
        # The actions after which the gradients of a stage are reduced.
        self._reduced_after: set[Action] = set()
        self._reduces_each = False
        self._split: set[tuple[int, int | None]] = set()
        self._gathered: set[Action] = set()
        # Whether any weight gradient is deferred.
        self._defers = weight_gradients.is_always_needed

    def by_kind(self) -> dict[ActionKind, Callable[[Action], None]]:
        """The handler of each kind of action."""
        return {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.INPUT_GRADIENT: self._input_gradient,
            ActionKind.WEIGHT_GRADIENT: self._weight_gradient,
            ActionKind.SEND_ACTIVATION: self.messages.send,
            ActionKind.RECEIVE_ACTIVATION: self._receive_activations,
            ActionKind.SEND_GRADIENT: self.messages.send,
            ActionKind.RECEIVE_GRADIENT: self._receive_gradients,
            ActionKind.REDUCE_GRADIENTS: self._reduce_gradients,
            ActionKind.UNSHARD: self._unshard,
            ActionKind.RESHARD: self._reshard,
        }

    def expect(self, program: Program) -> None:
        """Prepare for a program: find the actions after which the gradients of a stage are reduced."""
        forwards = [(stage, microbatch or 0) for stage, kind, microbatch in program if kind is ActionKind.FORWARD]
        self._inputs.expect(forwards)
        self._split = {(stage, microbatch) for stage, kind, microbatch in program if kind is ActionKind.INPUT_GRADIENT}
        self._defers = bool(self._split) or self._weight_gradients.is_always_needed
        if self._defers:
            self._weight_gradients.begin(splits=bool(self._split))
        self._reduced_after = reduced_after(program)
        self._reduces_each = any(
            kind is ActionKind.REDUCE_GRADIENTS and microbatch is not None for _, kind, microbatch in program
        )

    def finish(self) -> None:
        """Wait for the remaining sends, and check that nothing is left.

        Raises:
            ScheduleError: the program lacks an action.
        """
        left = [*self.messages.finish(), *self._wgrad_tasks]
        left += [Action(stage, ActionKind.BACKWARD, microbatch) for stage, microbatch in self._graphs]
        if left:
            raise ScheduleError(f"the program lacks {left[0]}. Check it with check_program.")

    def _call(self, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return call_arguments(self._step.model_inputs(inputs))

    def _plan(self, action: Action) -> Any:
        return self._plans[action.microbatch or 0][action.stage]

    def _receive_activations(self, action: Action) -> None:
        self.messages.receive(action, self._plan(action).incoming_specs)

    def _receive_gradients(self, action: Action) -> None:
        specs = [spec for spec in self._plan(action).outgoing_specs if spec.requires_grad]
        self.messages.receive(action, specs)

    def _forward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch or 0
        plan, step = self._plan(action), self._step
        if (stage, microbatch) in self._graphs:
            raise ScheduleError(f"{action} runs again before its backward. Check the program with check_program.")
        tensors = self.messages.take(action) if stage else []
        if step.weights is not None:
            step.weights.wait(stage)
        if self._recorder is not None:
            self._recorder.start()
        stage_input = StageInput(tensors, plan.incoming_specs, step.training)
        inputs = self._inputs.take(stage, microbatch)
        args, kwargs = self._call(inputs)
        num_stored = sum(not graph.recomputes for graph in self._graphs.values())
        recompute = step.training and num_stored >= step.max_stored_microbatches
        defers = self._defers and step.training
        splits = (stage, action.microbatch) in self._split
        values = stage_input.take_values()
        is_watched = plan.is_last and step.watched is not None
        around, watched = step.watched_forward if not microbatch else None, step.watched_stage
        with (
            around() if around is not None else nullcontext(),
            step.watched(microbatch, inputs, values) if is_watched and step.watched else nullcontext(),
        ):
            with (
                watched(stage, microbatch, inputs, values, plan.is_last) if watched is not None else nullcontext(),
                self._weight_gradients.recording_forward(splits) if defers else nullcontext(),
            ):
                key = step.keys[microbatch]
                try:
                    found = self._stages.forward(plan, args, kwargs, values, key, recompute)
                except Exception as error:
                    error.add_note(f"hybridpp: in model(*{describe_arguments(args)}, **{describe_arguments(kwargs)})")
                    raise
            self.passed = action
            tensors, outputs, context = found
            loss = self.losses.of(microbatch, outputs, inputs) if plan.is_last else None
        if step.training:
            stage_output = None if plan.is_last else StageOutput(tensors, plan.outgoing_specs)
            self._graphs[stage, microbatch] = _Graph(stage_input, stage_output, loss, recompute, context)
        if not plan.is_last:
            self.messages.pass_activations(action, tensors)

    def _backward(self, action: Action) -> None:
        is_last = action in self._reduced_after
        # A micro-batch whose loss has no items adds to nothing.
        graph = self._graphs[action.stage, action.microbatch or 0]
        pending = () if graph.stage_output is None and graph.loss is None else None
        is_observed = is_last and self._step.begin_last_backward(action.stage, pending)
        if not self._defers:
            self._run_backward(action)
        elif not is_observed:
            with self._weight_gradients.full_backward():
                self._run_backward(action)
        else:
            # Input gradients first, then weight gradients one by one, so that each reduction can start when its
            # gradient is complete.
            with self._weight_gradients.input_backward(splits=False) as tasks:
                self._run_backward(action)
            self._weight_gradients.add(tasks, final=True)
        self._step.end_backward()

    def _input_gradient(self, action: Action) -> None:
        with self._weight_gradients.input_backward(splits=True) as tasks:
            self._run_backward(action)
        self._step.end_backward()
        self._wgrad_tasks[action._replace(kind=ActionKind.WEIGHT_GRADIENT)] = tasks

    def _weight_gradient(self, action: Action) -> None:
        tasks = take_held(self._wgrad_tasks, action)
        if is_last := action in self._reduced_after:
            names = {name for task in tasks for name in task.binding.names}
            self._step.begin_last_backward(action.stage, names)
        self._weight_gradients.add(tasks, final=is_last)
        self._step.end_backward()

    def _run_backward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch or 0
        stage_input, stage_output, loss, _, context = take_held(self._graphs, (stage, microbatch))
        received = []
        if stage_output is not None:
            received = self.messages.take(action._replace(kind=ActionKind.BACKWARD))
        if self._step.weights is not None:
            self._step.weights.wait(stage)
        if self._recorder is not None:
            self._recorder.start()
        stage_input.expect_gradients()
        edge = None if loss is None else get_gradient_edge(loss)
        nodes = stage_output.nodes if stage_output else [edge.node] if edge else []
        if self._defers:
            self._weight_gradients.begin_at(nodes)
        checked = nullcontext() if microbatch or self._step.checked is None else self._step.checked(nodes)
        with self._stages.recomputing(context), checked:
            if stage_output is not None:
                stage_output.backward(received)
            elif edge is not None and loss is not None:
                # From the edge: backward of a tensor disables torch's function modes, which recomputation may need.
                weight = torch.full_like(loss, self._step.loss_weights[microbatch])
                torch.autograd.backward(edge, weight)
            elif self._step.weights is not None and not stage:
                # Its loss has no items, so there is nothing to go back from. Of a single stage, replicas gather weights
                # by unit, and others do for their backward pass.
                self._step.weights.gather_as_others(backward=True)
        self.passed = action
        if stage:
            self.messages.pass_gradients(action, stage_input.gradients())

    def _unshard(self, action: Action) -> None:
        assert self._step.weights is not None, "the program is for sharded weights"
        if action.microbatch is None:
            self._step.weights.unshard(action.stage)
        else:
            # Of a micro-batch that other replicas have: first of its forward, then of its backward pass.
            is_backward = action in self._gathered
            if is_backward and self._reduces_each:
                self._step.begin_last_backward(action.stage, ())
            self._gathered.add(action)
            self._step.weights.gather_as_others(backward=is_backward)

    def _reshard(self, action: Action) -> None:
        assert self._step.weights is not None, "the program is for sharded weights"
        self._step.weights.reshard(action.stage)

    def _reduce_gradients(self, action: Action) -> None:
        is_missing = action.microbatch is not None and action.microbatch >= len(self._step.microbatches)
        if is_missing and action._replace(kind=ActionKind.UNSHARD) not in self._gathered:
            # Of a micro-batch that other replicas have.
            self._step.begin_last_backward(action.stage, ())
        self._step.reduce_gradients(action.stage)
