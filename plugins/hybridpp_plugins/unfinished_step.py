"""What is left of a step that an error ended on this rank, and whose error the script may catch here alone."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import torch

from hybridpp.data_parallel import GradientReducer
from hybridpp.pipeline import EndedInsideError, PipelineStep, RankProgram, RestOfStep, SplitBatch, StepResult
from hybridpp_plugins.step_epilogue import StepEpilogue


@dataclass
class UnfinishedStep:
    """A step that an error ended on this rank between its actions, while other replicas are in it.

    If the script does not catch the error, the process ends, and the others get an error at once. If it does, they get
    one in :meth:`finish`, which this rank's next call calls. Without pipelines only: there, ranks wait for activations.

    Args:
        batch, task, program: of the step.
        rest: of the program.
        reducer: of the gradients; None: none are computed.
        epilogue: ends the step.
        share_buffers: brings buffers to what replicas agree on.
        end_accumulation: reduces gradients after the passes.
        abort: drops what the step computed.
    """

    batch: SplitBatch
    task: PipelineStep
    program: RankProgram
    rest: RestOfStep
    reducer: GradientReducer | None
    epilogue: StepEpilogue
    share_buffers: Callable[[PipelineStep], None]
    end_accumulation: Callable[[], None] | None
    abort: Callable[[PipelineStep], None]
    _reduces: bool = field(init=False)

    def __post_init__(self) -> None:
        self._reduces = self.reducer is not None and self.reducer.is_syncing
        if self.reducer is not None:
            self.reducer.consume()  # nothing is left for an update

    def finish(self) -> None:
        """Take part in the rest of the step, and tell the others. Collective: all ranks."""
        task, failure = self.task, EndedInsideError()
        with ExitStack() as contexts:
            contexts.callback(self.abort, task)
            contexts.enter_context(torch.inference_mode(False))
            contexts.enter_context(torch.set_grad_enabled(task.training))
            if self.reducer is not None:
                contexts.enter_context(self.reducer.resumed(self._reduces))
            self.rest.run()
            self.share_buffers(task)
            if self.end_accumulation is not None:
                self.end_accumulation()
            if task.criterion is not None:
                none = StepResult(torch.empty(0, dtype=torch.float64), [False] * len(self.batch.microbatches), {})
                with suppress(EndedInsideError):
                    end = self.epilogue.begin(self.batch, none, task, failure)
                    self.epilogue.close(end, self.program, task, failure)
