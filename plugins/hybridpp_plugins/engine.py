"""One boosted model: runs its steps."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hybridpp.cluster import microbatch_key, preserved_random_state
from hybridpp.config import PipelineConfig
from hybridpp.data_parallel import GradientBuckets
from hybridpp.errors import ConfigError, NonFiniteLossError
from hybridpp.partition import StagedModel
from hybridpp.pipeline import (
    Executor,
    RankProgram,
    Report,
    SplitBatch,
    Step,
    StepResult,
    agree,
    merge_outputs,
    read_batch,
    split_batch,
)
from hybridpp.plugin import Criterion
from hybridpp.precision import Formats, MasterWeights
from hybridpp.tensor_parallel import gathered
from hybridpp_plugins.before import Before
from hybridpp_plugins.closing import close_step
from hybridpp_plugins.examination import Examination
from hybridpp_plugins.layout import Layout
from hybridpp_plugins.optimizer import HybridOptimizer
from hybridpp_plugins.planning import Planner
from hybridpp_plugins.recording import Recording
from hybridpp_plugins.trainable import Trainable

_FIRST_EVALUATION = 2**62


@dataclass
class Engine:
    """Everything that belongs to one boosted model on this rank.

    Attributes:
        staged: the model and which stage of it is here.
        layout: this rank's groups.
        pipeline: how batches are split.
        planner: makes the programs they are run by.
        device: where this rank computes.
        seed: of dropout and whatever else draws random numbers in the forward.
        executor: runs schedules.
        examination: finds what went wrong in a step.
        optimizer: the boosted optimizer, if there is one.
        buckets: the gradients.
        masters: fp32 masters; empty in fp32.
        trainable: what ``optimizer`` knows.
        before: what the model was before boost.
        formats: modules that compute in another format than the rest.
        num_steps: training steps run so far.
        num_evaluations: evaluations run so far.
        recording: takes down when actions run, if someone wants to know.
    """

    staged: StagedModel
    layout: Layout
    pipeline: PipelineConfig
    planner: Planner
    device: torch.device
    seed: int
    executor: Executor
    examination: Examination
    optimizer: HybridOptimizer | None
    buckets: GradientBuckets | None
    trainable: Trainable
    masters: MasterWeights
    before: Before
    formats: Formats
    num_steps: int = 0
    num_evaluations: int = 0
    recording: Recording | None = None

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of a boosted model (an average of its weights, say) is no boosted model: it has no engine."""
        return

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return self.staged.model

    def no_sync(self) -> AbstractContextManager[None]:
        """Gradients only add up inside."""
        return nullcontext() if self.buckets is None else self.buckets.no_sync()

    def check_call(self, criterion: Criterion | None, optimizer: Optimizer | None, return_loss: bool) -> None:
        """Refuse arguments of ``execute_pipeline`` that do not fit together, before anything is communicated."""
        self.before.unfilled.check()
        training = torch.is_grad_enabled()
        if optimizer is not None and optimizer is not self.optimizer:
            raise ConfigError("execute_pipeline takes the optimizer that booster.boost returned for this model.")
        if training and optimizer is None:
            raise ConfigError(
                "execute_pipeline needs the boosted optimizer where gradients are enabled. Pass optimizer=, or call it "
                "under torch.no_grad() to evaluate."
            )
        if criterion is None and (training or return_loss):
            raise ConfigError(
                "execute_pipeline needs criterion(outputs, inputs) to compute a loss. Pass it, or return_loss=False "
                "under torch.no_grad()."
            )

    def step(
        self, data_iter: Iterator[Any], criterion: Criterion | None, return_loss: bool, return_outputs: bool
    ) -> dict[str, Any]:
        """One step of training, or of evaluation where gradients are disabled. Collective: all ranks."""
        training = torch.is_grad_enabled()
        criterion = criterion if training or return_loss else None

        def prepare() -> SplitBatch:
            if training:
                self.trainable.check(self.model)
            return split_batch(
                read_batch(data_iter),
                num_microbatches=self.pipeline.num_microbatches,
                microbatch_size=self.pipeline.microbatch_size,
                num_items=getattr(criterion, "num_items", None),
            )

        batch, reports = agree(self.layout.control, self.layout.pipelines, training, prepare)
        task = self._task(batch, reports, criterion, training, return_outputs)
        program = self._programs(reports, training)
        if training and self.optimizer is not None:
            self.optimizer.begin_accumulation()
        try:
            with preserved_random_state(self.device):
                recorder = None if self.recording is None else self.recording.recorder
                result = self.executor.run(program, task, recorder)
            if training and self.buckets is not None:
                self.buckets.finish()
            loss = self._close(batch, result, program, task) if criterion is not None else None
        except BaseException:
            if training and self.buckets is not None:
                self.buckets.discard()
            raise
        if training:
            self.num_steps += 1
        else:
            self.num_evaluations += 1
        outputs = None
        if return_outputs and result.outputs:
            parts = [gathered(result.outputs[place]) for place in range(len(batch.microbatches))]
            outputs = merge_outputs(parts, batch.microbatches)
        return {"loss": loss if return_loss else None, "outputs": outputs}

    def _programs(self, reports: list[Report], training: bool) -> RankProgram:
        """What this rank does. A schedule that does not fit any replica's batch is refused by every rank alike."""
        counts = {int(reports[ranks[0]].num_microbatches) for ranks in self.layout.pipelines}
        programs = {count: self.planner.programs(count, training) for count in sorted(counts)}
        mine = int(reports[self.layout.world.rank].num_microbatches)
        return programs[mine][self.layout.pp.rank]

    @contextmanager
    def recorded(self) -> Iterator[Recording]:
        """Take down when actions run. Collective: all ranks, at the start and at the end."""
        self.recording = recording = Recording(self.layout, self.device)
        try:
            yield recording
        finally:
            self.recording = None
        recording.finish()

    @property
    def _last_place(self) -> int:
        """Which rank of a pipeline holds the last stage."""
        return self.planner.placement[-1]

    def _task(
        self,
        batch: SplitBatch,
        reports: list[Report],
        criterion: Criterion | None,
        training: bool,
        keep_outputs: bool,
    ) -> Step:
        heads = [reports[ranks[0]] for ranks in self.layout.pipelines]
        replica = self.layout.here.dp
        weight = batch.num_items / sum(head.num_items for head in heads)
        if self.optimizer is not None:
            weight *= self.optimizer.loss_scale
        # Micro-batches are numbered over all replicas, so that two replicas never draw the same numbers.
        first = sum(int(head.num_microbatches) for head in heads[:replica])
        # Evaluations have numbers of their own: they draw anew each time and leave those of training alone.
        run = self.num_steps if training else _FIRST_EVALUATION + self.num_evaluations
        recomputation = self.pipeline.recomputation
        return Step(
            microbatches=batch.microbatches,
            loss_weights=[weight * microbatch.share for microbatch in batch.microbatches],
            keys=[microbatch_key(self.seed, run, first + n) for n in range(len(batch.microbatches))],
            criterion=criterion,
            training=training,
            keep_outputs=keep_outputs,
            last_backward=self.buckets.last_backward if self.buckets else lambda pending: False,
            reduce_gradients=self.buckets.launch if self.buckets else lambda: None,
            max_stored_microbatches=(recomputation.max_stored_microbatches or 0) if recomputation else 0,
        )

    def _close(self, batch: SplitBatch, result: StepResult, program: RankProgram, task: Step) -> torch.Tensor:
        """The mean loss over this replica's batch; the optimizer learns the norm. Collective: all ranks."""
        optimizer = self.optimizer if task.training else None
        early = optimizer if optimizer and optimizer.tells_norm_early else None
        closing = close_step(self.layout, self._last_place, batch, result, early)
        if closing.bad_loss is not None:
            value, place, rank = closing.bad_loss
            kind = "NaN" if math.isnan(value) else "infinite"
            first = self.examination.examine(program, task, closing.bad_loss)
            raise NonFiniteLossError(
                f"the loss of micro-batch {place} is {kind} (stage {self.staged.num_stages - 1} of "
                f"{self.staged.num_stages}, rank {rank}). The first inf or NaN: {first}. Check the inputs and the "
                "learning rate; in fp16, activations overflow beyond 65504: bf16 has the range of fp32."
            )
        if early and early.wants_report:
            early.scaling.found(self.examination.examine(program, task))
        return torch.tensor(closing.loss, dtype=torch.float32).to(self.device, non_blocking=True)
