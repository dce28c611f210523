"""Run a lowered schedule: one loop over the rank's actions."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import nn

from hybridpp.module_adapter import ModuleAdapter
from hybridpp.pipeline.boundary import Transport
from hybridpp.pipeline.handlers import Handlers
from hybridpp.pipeline.input_copies import InputCopies
from hybridpp.pipeline.recorder import Recorder
from hybridpp.pipeline.stage import PipelineStage
from hybridpp.pipeline.step import PipelineStep, StepResult
from hybridpp.pipeline.weight_gradients import WeightGradients
from hybridpp.schedule import Action, ActionKind, Program, Programs, completed_sends, lower, placement


class RankProgram(NamedTuple):
    """The actions of one rank, in order.

    Attributes:
        actions: compute and communication.
        completed_sends: for each action, the sends whose receive the peer has posted by then.
        placement: the rank of every stage, as an index into the pipeline's group.
        losses_after: number of actions after which this rank has computed all losses; 0: it computes none.
    """

    actions: Program
    completed_sends: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]
    losses_after: int


def rank_programs(programs: Programs) -> tuple[RankProgram, ...]:
    """The program of every rank, with communication, for checked compute programs."""
    lowered = lower(programs)
    where = placement(programs)
    return tuple(
        RankProgram(actions, done, where, _losses_after(actions, len(where) - 1))
        for actions, done in zip(lowered, completed_sends(lowered), strict=True)
    )


def _losses_after(actions: Program, last_stage: int) -> int:
    forwards = ((last_stage, ActionKind.FORWARD) == (stage, kind) for stage, kind, _ in actions)
    return max((place for place, is_one in enumerate(forwards, start=1) if is_one), default=0)


def _nothing(_: StepResult) -> None:
    pass


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
            raised it.
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
        self._stages = stages
        self._transport = transport
        self._device = device
        self._weight_gradients = weight_gradients or WeightGradients(ModuleAdapter(nn.Module()))
        self._around = around
        self._inputs = InputCopies(device)

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
        handlers = Handlers(
            self._stages,
            self._transport,
            self._device,
            self._weight_gradients,
            program.placement,
            step,
            recorder,
            self._inputs,
        )
        handlers.expect(program.actions)
        actions = list(zip(program.actions, program.completed_sends, strict=True))
        try:
            with self._around():
                self._run(actions[: program.losses_after], handlers, recorder)
                losses_known(handlers.result)
                self._run(actions[program.losses_after :], handlers, recorder)
                handlers.finish()
        except BaseException as error:
            error.add_note(f"hybridpp: in action {self.where} (stage, kind, micro-batch)")
            raise
        self.where = None
        return handlers.result

    def _run(
        self, actions: list[tuple[Action, tuple[Action, ...]]], handlers: Handlers, recorder: Recorder | None
    ) -> None:
        """Run actions, each with the sends that are complete by then."""
        handle = handlers.by_kind()
        for action, done in actions:
            self.where = action
            for sent in done:
                handlers.finish_send(sent)
            if recorder is not None:
                recorder.start()
            handle[action.kind](action)
            if recorder is not None:
                recorder.end(action)
