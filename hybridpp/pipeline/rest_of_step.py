"""What is left of the communication of a step that an error has ended on this rank."""

from collections.abc import Collection

from hybridpp.pipeline.step import PipelineStep
from hybridpp.schedule import Action, ActionKind, Program


class EndedInsideError(Exception):
    """Stands for the error that ended a step between its actions: this rank has raised it already.

    Attributes:
        code: that ranks report of it.
    """

    code = 2.0


_RUNS_BACKWARD = (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)


class RestOfStep:
    """The rest of a rank's program without its work, so that other replicas can complete the step.

    A replica that has fewer micro-batches than others does the same for those that it lacks.

    Args:
        program: all actions of this rank, which sends nothing to other stages.
        position: of the action that raised the error.
        step: the batch.
        reduced_after: the actions after which gradients are reduced.
        has_passed: whether the forward or backward pass of the action that raised the error had ended.
    """

    def __init__(
        self,
        program: Program,
        position: int,
        step: PipelineStep,
        *,
        reduced_after: Collection[Action],
        has_passed: bool,
    ):
        self._program, self._position, self._has_passed, self._step = program, position, has_passed, step
        self._reduced_after = reduced_after
        one_stage = all(action.stage == 0 for action in program)
        self._gathers_units = step.weights is not None and one_stage
        # Of micro-batches that other replicas have: first of a forward, then of a backward pass.
        self._gathered = {action for action in program[:position] if self._is_of_others(action)}

    def run(self) -> None:
        """Take part in it. Collective: all replicas."""
        for position in range(self._position, len(self._program)):
            self._run(self._program[position], is_first=position == self._position)
            if self._program[position].kind is ActionKind.FORWARD:
                self._step.settle()

    def _run(self, action: Action, *, is_first: bool) -> None:
        step = self._step
        if action in self._reduced_after and not is_first:
            step.begin_last_backward(action.stage, ())
        if self._is_of_others(action):
            self._gather_of_others(action)
        elif action.kind is ActionKind.UNSHARD and step.weights is not None:
            step.weights.unshard(action.stage)
        elif action.kind is ActionKind.RESHARD and step.weights is not None:
            step.weights.reshard(action.stage)
        elif action.kind is ActionKind.REDUCE_GRADIENTS:
            if self._lacks(action) and action._replace(kind=ActionKind.UNSHARD) not in self._gathered:
                step.begin_last_backward(action.stage, ())
            step.reduce_gradients(action.stage)
        elif self._gathers_units and not (is_first and self._has_passed):
            self._gather(action, backward=action.kind in _RUNS_BACKWARD)

    def _gather(self, action: Action, *, backward: bool) -> None:
        if self._step.weights is not None and (backward or action.kind is ActionKind.FORWARD):
            self._step.weights.gather_as_others(backward=backward)

    def _gather_of_others(self, action: Action) -> None:
        is_backward = action in self._gathered
        reduces_each = any(
            one.kind is ActionKind.REDUCE_GRADIENTS and one.microbatch is not None for one in self._program
        )
        if is_backward and reduces_each:
            self._step.begin_last_backward(action.stage, ())
        self._gathered.add(action)
        self._gather(action._replace(kind=ActionKind.FORWARD), backward=is_backward)

    def _is_of_others(self, action: Action) -> bool:
        return action.kind is ActionKind.UNSHARD and action.microbatch is not None

    def _lacks(self, action: Action) -> bool:
        return action.microbatch is not None and action.microbatch >= len(self._step.microbatches)
