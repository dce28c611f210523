"""Run a lowered schedule: one loop over the rank's actions."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import nn

from hybridpp.pipeline.handlers import Handlers
from hybridpp.pipeline.recorder import NoRecorder, Recorder
from hybridpp.pipeline.stage import Stage
from hybridpp.pipeline.step import Step, StepResult
from hybridpp.pipeline.transport import Transport
from hybridpp.pipeline.weight_gradients import WeightGradients
from hybridpp.schedule import Action, Program, Programs, lower, placement, sends_done


class RankProgram(NamedTuple):
    """What one rank does, in order.

    Attributes:
        actions: with communication.
        sends_done: for each of them, the sends that have certainly been asked for by then.
        placement: the rank (its place in the pipeline's group) of every stage.
    """

    actions: Program
    sends_done: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]


def rank_programs(programs: Programs) -> tuple[RankProgram, ...]:
    """What every rank does to carry out checked compute programs."""
    lowered = lower(programs)
    where = placement(programs)
    return tuple(RankProgram(actions, done, where) for actions, done in zip(lowered, sends_done(lowered), strict=True))


class Executor:
    """Runs programs on one rank.

    Args:
        stages: what the rank holds of the model.
        transport: to the other ranks.
        device: where the micro-batches go.
        weight_gradients: of the model; None: it has none that can be told apart.
        around: what to be in while a program runs.

    Attributes:
        where: the action under way, for whoever must report a rank that hangs; None between steps, and after an error
            the action it happened in.
    """

    def __init__(
        self,
        stages: Stage,
        transport: Transport,
        device: torch.device,
        weight_gradients: WeightGradients | None = None,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        self.where: Action | None = None
        self._stages = stages
        self._transport = transport
        self._device = device
        self._weight_gradients = weight_gradients or WeightGradients(nn.Module())
        self._around = around

    def run(self, program: RankProgram, step: Step, recorder: Recorder | None = None) -> StepResult:
        """Do every action of ``program`` in order.

        Collective: every rank of the pipeline, with programs of one schedule and the same micro-batches.

        Args:
            program: this rank's.
            step: the batch.
            recorder: takes down when each action ran.

        Raises:
            ScheduleError: the program does something before what it needs, twice, or not at all.
        """
        recorder = recorder or NoRecorder()
        handlers = Handlers(
            self._stages, self._transport, self._device, self._weight_gradients, program.placement, step, recorder
        )
        handlers.expect(program.actions)
        handle = handlers.by_kind()
        try:
            with self._around():
                for action, done in zip(program.actions, program.sends_done, strict=True):
                    self.where = action
                    for sent in done:
                        handlers.finish_send(sent)
                    recorder.start()
                    handle[action.kind](action)
                    recorder.end(action)
                handlers.finish()
        except BaseException as error:
            error.add_note(f"hybridpp: in action {self.where} (stage, kind, micro-batch)")
            raise
        self.where = None
        return handlers.result
