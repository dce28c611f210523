"""The engine of one boosted model, which runs its steps."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hybridpp.cluster import Section, microbatch_key, preserved_random_state
from hybridpp.config import PipelineConfig
from hybridpp.data_parallel import GradientReducer, RunningStatistics
from hybridpp.errors import DeadlockError, PeerError, PeerTimeoutError, RefusedByPeerError
from hybridpp.module_adapter import ModuleAdapter
from hybridpp.partition import StagedModel
from hybridpp.pipeline import (
    ActiveRecording,
    BatchReader,
    BatchUse,
    CriterionAdapter,
    Executor,
    ForwardSignature,
    LossReduction,
    PipelineStep,
    RankBatchInfo,
    RankProgram,
    RestOfStep,
    SignatureCache,
    SplitBatch,
    StepResult,
)
from hybridpp.plugin import Criterion, StepOptions
from hybridpp.precision import MasterWeights, ModuleDtypes
from hybridpp_plugins.criterion_check import CriterionCheck
from hybridpp_plugins.engine_handle import CopiedModel
from hybridpp_plugins.first_step_checks import FirstStepChecks
from hybridpp_plugins.layout import Layout
from hybridpp_plugins.model_info import OriginalModelInfo
from hybridpp_plugins.nonfinite_report import NonFiniteDiagnosis
from hybridpp_plugins.optimizer import HybridOptimizer
from hybridpp_plugins.optimizer_state import RunProgress
from hybridpp_plugins.schedule_planner import SchedulePlanner
from hybridpp_plugins.step_epilogue import PendingEnd, StepEpilogue
from hybridpp_plugins.step_problems import StepProblems
from hybridpp_plugins.step_results import StepResults
from hybridpp_plugins.trained_weights import TrainedWeights
from hybridpp_plugins.unfinished_step import UnfinishedStep

_FIRST_EVALUATION = 2**62
# Programs that are kept, of as many numbers of micro-batches; the least recently used is dropped.
_MAX_PROGRAMS = 256


def _nothing(*_: Any) -> None:
    pass


@dataclass
class Engine:
    """Everything that belongs to one boosted model on this rank.

    Attributes:
        adapter: holds what boost added to the model.
        staged: the model's stages on this rank.
        layout: this rank's groups.
        pipeline: how batches are split.
        planner: makes the programs that run a batch.
        device: where this rank computes.
        progress: the run's progress and seed; the optimizer's, if there is an optimizer.
        executor: runs programs.
        diagnosis: finds the first inf or NaN of a step.
        optimizer: the boosted optimizer; None: the model is not trained.
        buckets: the gradients.
        weights: those that it trains, and their fp32 masters.
        original: the model's names and dtypes before boost.
        module_dtypes: modules that compute in another dtype than the rest.
        criterion_check: checks whether criteria return sums.
        statistics: running statistics of the model.
        signatures: how the model and criteria are called.
        first_step: checks the first training step; None after it.
        recording: records when actions run; None: no recording is active.
        is_running: whether a step is running.
        interrupted: the error that ended a step, while other ranks of the pipeline wait for this one, or of whose
            messages some may come later; None: there was none.
        unfinished: the rest of such a step that other replicas are in; None: there is none.
        is_training: whether it trains, or the last one did.
        epilogue: ends every step.
    """

    adapter: ModuleAdapter
    staged: StagedModel
    layout: Layout
    pipeline: PipelineConfig
    planner: SchedulePlanner
    device: torch.device
    progress: RunProgress
    executor: Executor
    diagnosis: NonFiniteDiagnosis
    optimizer: HybridOptimizer | None
    buckets: GradientReducer | None
    weights: TrainedWeights
    original: OriginalModelInfo
    module_dtypes: ModuleDtypes
    statistics: RunningStatistics
    criterion_check: CriterionCheck = field(default_factory=CriterionCheck)
    signatures: SignatureCache = field(init=False)
    recording: ActiveRecording | None = None
    is_running: bool = False
    interrupted: str | None = None
    unfinished: UnfinishedStep | None = None
    is_training: bool = False

    def __post_init__(self) -> None:
        keeps_buffers = self.optimizer is not None and self.optimizer.replica_buffers is None
        self.first_step: FirstStepChecks | None = FirstStepChecks(self.layout, self.pipeline, keeps_buffers)
        pipelines, placement, name = self.layout.pipelines, self.planner.placement, type(self.model).__name__
        problems = StepProblems(self.staged, pipelines, self.optimizer, self.criterion_check, self.diagnosis.diagnose)
        self.epilogue = StepEpilogue(
            name, self.layout, placement, self.optimizer, self.criterion_check, problems.handle, self.device
        )
        world = self.layout.world
        self._stop = world.stop
        self._reader = BatchReader(self.layout.control, pipelines, self.pipeline, name, self._stop, world.progress)
        self._results = StepResults(self.layout, placement, self.pipeline.dims_of_outputs, self.device, name)
        self._sharded = self.weights.sharded
        self._has_losses = self.layout.here.pp == self.planner.placement[-1]
        recomputation = self.pipeline.recomputation
        self._max_stored = (recomputation.max_stored_microbatches or 0) if recomputation else 0
        # By the numbers of micro-batches of all replicas and of this replica, and by training or evaluation.
        self._programs: dict[tuple[frozenset[int], int, bool], RankProgram] = {}

    def __deepcopy__(self, memo: Any) -> CopiedModel:
        """A placeholder: a copy of a boosted model (averaged weights, for example) is not boosted."""
        self.weights.check_readable("a copy of the model")
        return CopiedModel(self.model)

    @property
    def masters(self) -> MasterWeights:
        """The fp32 masters that this rank updates; none in fp32."""
        return self.weights.masters

    @property
    def zero_stage(self) -> int:
        """What replicas divide among themselves."""
        return self.weights.zero.zero_stage

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return self.staged.model

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which gradients are only accumulated."""
        return nullcontext() if self.buckets is None else self.buckets.no_sync()

    @property
    def section(self) -> Section:
        """Of the next step: its first one, and the first evaluation, may compile and choose kernels."""
        num_done = self.progress.num_steps if torch.is_grad_enabled() else self.progress.num_evaluations
        return "step" if num_done else "setup"

    def location(self) -> str:
        """Where a step is, in words; called by a watchdog's thread."""
        step = f"training step {self.progress.num_steps + 1}"
        if not self.is_training:
            step = f"evaluation {self.progress.num_evaluations + 1}"
        action = self.executor.where
        return f"{step} of {type(self.model).__name__}" + (f", {action.in_words}" if action else "")

    def step(self, data_iter: Iterator[Any], criterion: Criterion | None, options: StepOptions) -> dict[str, Any]:
        """One step of training, or of evaluation if gradients are disabled. Collective: all ranks."""
        self._stop.begin_step()
        self.is_training = training = torch.is_grad_enabled()
        has_losses = training or options.return_loss or options.return_losses
        use = BatchUse(self.signatures.of(criterion if has_losses else None), training, options.num_microbatches)
        if self.epilogue.evaluations.pending:
            self.epilogue.evaluations.wait(0 if training else 1)
        self.is_running = True
        self._mark("read")
        try:
            batch, infos, failure = self._reader.read(
                data_iter, use, self._check_trained if training else _nothing, self.first_step
            )
            self._reader.read_ahead(data_iter, use)
            if self.buckets is not None:
                self.buckets.are_in_step = len(self._counts(infos)) == 1
            task = self._task(batch, infos, use.called, training, options.return_outputs)
            self._mark("actions")
            result, loss = self._run(
                batch, task, self._program(infos, training), failure, getattr(use.called, "identity", None)
            )
            found: dict[str, Any] = {"outputs": None}
            if options.return_losses or options.return_outputs:
                if self._results.meets(options):
                    self.epilogue.evaluations.wait()
                found = self._results.of(batch, result, options)
        except RefusedByPeerError:
            raise
        except (PeerError, DeadlockError) as error:
            # Of this step, messages may come that the next one would take for its own.
            self.interrupted = f"{type(error).__name__}: {error}"
            # After a timeout, the other rank may still not say anything.
            if not isinstance(error, PeerTimeoutError):
                self._reader.check_calls()
                self.epilogue.check_calls()
            raise
        finally:
            self.is_running = False
            self._mark("")
        if training:
            self.progress.num_steps += 1
            self._stop.step_done()
        else:
            self.progress.num_evaluations += 1
        return {"loss": loss if options.return_loss else None, **found}

    def _check_trained(self) -> None:
        if self.optimizer is not None:
            self.optimizer.target.check(self.model)

    def _counts(self, infos: list[RankBatchInfo]) -> frozenset[int]:
        """The replicas' numbers of micro-batches."""
        return frozenset(int(infos[ranks[0]].num_microbatches) for ranks in self.layout.pipelines)

    def _program(self, infos: list[RankBatchInfo], training: bool) -> RankProgram:
        """This rank's program. A schedule that does not fit some replica's batch is refused on every rank."""
        counts = self._counts(infos)
        own_count = int(infos[self.layout.world.rank].num_microbatches)
        key = counts, own_count, training
        program = self._programs.pop(key, None)
        if program is None:
            most = max(counts)
            programs = {count: self.planner.programs(count, training, most) for count in sorted(counts)}
            program = programs[own_count][self.layout.pp.rank]
        self._programs[key] = program  # now the most recent
        while len(self._programs) > _MAX_PROGRAMS:
            del self._programs[next(iter(self._programs))]
        return program

    def _task(
        self,
        batch: SplitBatch,
        infos: list[RankBatchInfo],
        called: CriterionAdapter | ForwardSignature,
        training: bool,
        keep_outputs: bool,
    ) -> PipelineStep:
        replica_infos = [infos[ranks[0]] for ranks in self.layout.pipelines]
        # Sums add up over the replicas, as over micro-batches.
        weight = 1.0 if batch.sums else batch.num_items / sum(info.num_items for info in replica_infos)
        if self.optimizer is not None:
            weight *= self.optimizer.loss_scale
        # Micro-batches are numbered over all replicas, so that replicas draw different random numbers.
        first_microbatch = sum(int(info.num_microbatches) for info in replica_infos[: self.layout.here.dp])
        # Evaluations have separate keys: each draws new random numbers, and training draws the same without them.
        run = self.progress.num_steps if training else _FIRST_EVALUATION + self.progress.num_evaluations
        loss_of = called if isinstance(called, CriterionAdapter) else None
        # In training, the loss is a mean over all replicas.
        num_averaged = (
            sum(int(info.num_microbatches) for info in replica_infos) if training else len(batch.microbatches)
        )
        unknown = loss_of if loss_of and num_averaged > 1 and self._is_unknown(loss_of, training) else None
        observed = unknown and self.criterion_check.begin(unknown, training, self.pipeline, batch.microbatches)
        return PipelineStep(
            microbatches=batch.microbatches,
            loss_weights=[weight * microbatch.share for microbatch in batch.microbatches],
            keys=[
                microbatch_key(self.progress.seed, run, first_microbatch + n) for n in range(len(batch.microbatches))
            ],
            criterion=observed or loss_of,
            training=training,
            keep_outputs=keep_outputs,
            begin_last_backward=self.buckets.begin_last_backward if self.buckets else lambda stage, pending: False,
            end_backward=self.buckets.end_backward if self.buckets else _nothing,
            reduce_gradients=self.buckets.launch_remaining if self.buckets else lambda stage: None,
            weights=self._sharded,
            max_stored_microbatches=self._max_stored,
            model_inputs=called.model_inputs,
            inspect_loss=self.criterion_check.inspect if unknown else None,
        )

    def _is_unknown(self, criterion: CriterionAdapter, training: bool) -> bool:
        """Whether this rank must still check if a criterion returns a sum."""
        is_known = criterion.declares_reduction or criterion.identity is self.criterion_check.known.get(training)
        return self._has_losses and not is_known

    def _run(
        self,
        batch: SplitBatch,
        task: PipelineStep,
        program: RankProgram,
        failure: Exception | None,
        identity: Any,
    ) -> tuple[StepResult, Tensor | None]:
        """Run all micro-batches, then the end of the step. Collective: all ranks."""
        optimizer = self.optimizer if task.training else None
        if optimizer is not None:
            optimizer.begin_accumulation()
        end: PendingEnd | None = None
        result: StepResult | None = None

        def losses_known(result: StepResult) -> None:
            nonlocal end
            end = self.epilogue.begin(batch, result, task, failure)

        try:
            with preserved_random_state(self.device):
                # Without pipelines, the other replicas learn with the losses whether this one got through the passes.
                early = task.criterion is not None and self.layout.pp.size > 1
                result = self._execute(batch, task, program, losses_known if early else _nothing)
            self._mark("end")
            if task.criterion is not None and end is None:
                losses_known(result)
            if optimizer is not None:
                optimizer.end_accumulation()
            loss = None if end is None else self.epilogue.loss(end, program, task, failure, identity)
        except BaseException as error:
            rest = self.executor.rest if result is None else None
            is_alone = self.layout.dp.size == 1 or self.layout.pp.size > 1
            if rest is None or is_alone or isinstance(error, PeerError | DeadlockError):
                self._abort(task)
            else:
                self._leave_unfinished(batch, task, program, rest)
            raise
        return result, loss

    def _abort(self, task: PipelineStep) -> None:
        """After an error in a step: drop what it computed."""
        self.executor.rest = None
        if task.training and self.buckets is not None:
            self.buckets.abort()
        if self._sharded is not None:
            self._sharded.cancel()
        self.criterion_check.reduction = LossReduction.MEAN

    def _leave_unfinished(self, batch: SplitBatch, task: PipelineStep, program: RankProgram, rest: RestOfStep) -> None:
        """Note what is left of a step that an error ended: the script may catch it, on this rank alone."""
        optimizer = self.optimizer if task.training else None
        self.unfinished = UnfinishedStep(
            batch,
            task,
            program,
            rest,
            self.buckets if task.training else None,
            self.epilogue,
            self._share_buffers,
            None if optimizer is None else optimizer.end_accumulation,
            self._abort,
        )

    def _share_buffers(self, task: PipelineStep) -> None:
        """After the passes of a step, bring buffers to what all replicas agree on. Collective: replicas."""
        if self.statistics.is_needed:
            self.statistics.finish()
        if task.training and self.optimizer is not None and self.optimizer.replica_buffers is not None:
            self.optimizer.replica_buffers.finish()

    def _execute(
        self, batch: SplitBatch, task: PipelineStep, program: RankProgram, losses_known: Callable[[StepResult], None]
    ) -> StepResult:
        recorder = None if self.recording is None else self.recording.recorder
        checks = self.first_step
        if self.statistics.is_needed:
            self.statistics.begin()
        buffers = self.optimizer.replica_buffers if task.training and self.optimizer else None
        if buffers is not None:
            buffers.begin()
        with self._noted(), checks.watched(self.model, batch, task.training) if checks else nullcontext():
            result = self.executor.run(program, task, recorder, losses_known)
        self._share_buffers(task)
        if task.training:
            self.first_step = None
        return result

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """A context for the actions of a step, which notes an error between them."""
        try:
            yield
        except (PeerError, DeadlockError):
            raise
        except BaseException as error:
            if self.executor.where is not None and self.layout.pp.size > 1:
                self.interrupted = f"{type(error).__name__}: {error}"
            raise

    def _mark(self, phase: str) -> None:
        """Note where in the step the rank is, if it is recorded."""
        if self.recording is not None:
            self.recording.recorder.mark(phase)
