"""What the engine of a boosted model consists of, and what is asked of it beside its steps."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from hybridpp.cluster import Patience, get_dist_logger
from hybridpp.config import PipelineConfig
from hybridpp.data_parallel import GradientReducer, RunningStatistics
from hybridpp.errors import ConfigError, DeadlockError, PeerError, PeerTimeoutError
from hybridpp.module_adapter import ModuleAdapter
from hybridpp.nn import walk
from hybridpp.partition import StagedModel
from hybridpp.pipeline import (
    ActiveRecording,
    BatchReader,
    Executor,
    LossReduction,
    PipelineStep,
    RankProgram,
    RestOfStep,
    SignatureCache,
    SplitBatch,
)
from hybridpp.precision import MasterWeights, ModuleDtypes
from hybridpp.tensor_parallel import ScriptReads
from hybridpp_plugins.background_save import SaveStatus
from hybridpp_plugins.criterion_check import CriterionCheck
from hybridpp_plugins.criterion_weights import CriterionWeights
from hybridpp_plugins.engine_handle import CopiedModel
from hybridpp_plugins.first_step_checks import FirstStepChecks
from hybridpp_plugins.interruption import Interruption
from hybridpp_plugins.kept_state_check import KeptStateCheck
from hybridpp_plugins.layout import Layout
from hybridpp_plugins.model_info import OriginalModelInfo
from hybridpp_plugins.nonfinite_report import NonFiniteDiagnosis
from hybridpp_plugins.optimizer import HybridOptimizer
from hybridpp_plugins.optimizer_state import RunProgress
from hybridpp_plugins.optimizer_step import SharedModes
from hybridpp_plugins.schedule_planner import SchedulePlanner
from hybridpp_plugins.step_epilogue import FoundInPassError, StepEpilogue
from hybridpp_plugins.step_problems import StepProblems
from hybridpp_plugins.step_results import StepResults
from hybridpp_plugins.tp_ways_check import TensorParallelWaysCheck
from hybridpp_plugins.trained_weights import TrainedWeights
from hybridpp_plugins.unfinished_step import UnfinishedStep

# How long a rank that has lost a peer looks for what says why; then it ends, as others may wait for it.
_PATIENCE_S = 1.0
# In which a script may draw random numbers for weights of a stage, or take their norms; gradients are watched in all.
_NUM_WATCHED_STEPS = 2


@dataclass
class EngineParts:
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
        ways_check: looks at what sharded blocks do in some steps; None: there are none.
        criterion_check: knows what the losses of criteria are means over.
        statistics: running statistics of the model.
        criteria: checks whether criteria have weights that train.
        signatures: how the model and criteria are called.
        first_step: checks the first training step; None after it.
        kept_state: looks at what the forward keeps from call to call; None: no later step is watched.
        recording: records when actions run; None: no recording is active.
        is_running: whether a step is running.
        interruption: notes the error that ended a step, while other ranks wait for this one, or of whose messages some
            may come later.
        unfinished: the rest of a step that an error ended, and that other replicas are in; None: there is none.
        is_training: whether it trains, or the last one did.
        script_reads: what a script may read of weights and gradients between steps.
        on_plain_weights: a context for what the library does with weights, in which none is watched.
        model: the user's.
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
    ways_check: TensorParallelWaysCheck | None = None
    criterion_check: CriterionCheck = field(default_factory=CriterionCheck)
    signatures: SignatureCache = field(init=False)
    criteria: CriterionWeights = field(init=False)
    script_reads: ScriptReads = field(default_factory=lambda: ScriptReads(()))
    on_plain_weights: Callable[[], AbstractContextManager[None]] = nullcontext
    recording: ActiveRecording | None = None
    is_running: bool = False
    interruption: Interruption = field(default_factory=Interruption)
    unfinished: UnfinishedStep | None = None
    is_training: bool = False
    tells_of_copies: bool = True

    def __post_init__(self) -> None:
        self.model = self.staged.model
        sent = None if self.optimizer is None else self.optimizer.replica_buffers
        keeps_buffers = self.optimizer is not None and (sent is None or not sent.has_buffers)
        self.first_step: FirstStepChecks | None = FirstStepChecks(self.model, self.layout, self.pipeline, keeps_buffers)
        self.kept_state: KeptStateCheck | None = None
        self._reported_state: set[str] = set()
        pipelines, placement, name = self.layout.pipelines, self.planner.placement, type(self.model).__name__
        check, control = self.criterion_check, self.layout.control
        problems = StepProblems(self.staged, pipelines, self.optimizer, check, self.diagnosis.diagnose, control)
        self.epilogue = StepEpilogue(
            name, self.layout, placement, self.optimizer, self.criterion_check, problems.handle, self.device
        )
        self.epilogue.modes = SharedModes(self.model, self.staged.owners, placement)
        if self.optimizer is not None:
            self._look_for_kept_state()
        world = self.layout.world
        self._stop = world.stop
        self._reader = BatchReader(self.layout.control, pipelines, self.pipeline, name, self._stop, world.progress)
        self._results = StepResults(self.layout, placement, self.pipeline.dims_of_outputs, self.device, name)
        self._sharded = self.weights.sharded
        # By replica, the ranks that compute losses.
        self._loss_ranks = [self.layout.ranks_at(replica, placement[-1]) for replica in range(len(pipelines))]
        self._has_losses = self.layout.here.pp == self.planner.placement[-1]
        recomputation = self.pipeline.recomputation
        self._max_stored = (recomputation.max_stored_microbatches or 0) if recomputation else 0
        # By the numbers of micro-batches of all replicas and of this replica, and by training or evaluation.
        self._programs: dict[tuple[frozenset[int], int, bool], RankProgram] = {}
        # Hooks of all kinds are numbered: by others, the script has put some on modules since the step before.
        self._last_hook = 0

    def __deepcopy__(self, memo: Any) -> CopiedModel:
        """A placeholder: a copy of a boosted model (averaged weights, for example) is not boosted."""
        self.weights.check_readable("a copy of the model")
        if self.weights.in_half and self.optimizer is not None and self.tells_of_copies:
            self.tells_of_copies = False
            get_dist_logger().warning(
                f"a copy of {type(self.model).__name__} holds its weights in half precision, where an average that "
                "small steps update (EMA, SWA, a teacher) loses most of them. Make averages with "
                "booster.averaged(model), which are in fp32.",
                ranks=[0],
            )
        return CopiedModel(self.model)

    @property
    def masters(self) -> MasterWeights:
        """The fp32 masters that this rank updates; none in fp32."""
        return self.weights.masters

    @property
    def zero_stage(self) -> int:
        """What replicas divide among themselves."""
        return self.weights.zero.zero_stage

    def watch_parts(self) -> None:
        """From now on, watch what a script makes of weights and gradients of a part of the model between steps."""
        tells = self.layout.here.dp == self.layout.here.tp == 0
        is_short = self.buckets is None or not self.buckets.exposes_grad
        reads = ScriptReads(
            walk.parameters(self.model),
            self.layout.pp.size if tells else 1,
            lambda: is_short and (self.optimizer is None or self.optimizer.num_updates >= _NUM_WATCHED_STEPS),
            self._end_watch,
        )
        if not reads.has_parts:
            return
        self.script_reads, self.on_plain_weights = reads, reads.plain
        self.staged.around_call = reads.around(self.staged.around_call)
        if self.optimizer is not None:
            self.optimizer.on_plain_weights = reads.plain
        reads.watch()

    def _end_watch(self) -> None:
        """Watch nothing any more."""
        self.on_plain_weights = nullcontext
        if self.optimizer is not None:
            self.optimizer.on_plain_weights = nullcontext

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which gradients are only accumulated."""
        return nullcontext() if self.buckets is None else self.buckets.no_sync()

    def share(self, saves: SaveStatus, interruption: Interruption) -> None:
        """Take what all models of a plugin share."""
        self.epilogue.saves, self.interruption = saves, interruption
        if self.optimizer is not None:
            self.optimizer.interruption = interruption
            if self.optimizer.failed_pass is not None:
                self.optimizer.failed_pass.interruption = interruption

    def location(self) -> str:
        """Where a step is, in words; called by a watchdog's thread."""
        step = f"training step {self.progress.num_steps + 1}"
        if not self.is_training:
            step = f"evaluation {self.progress.num_evaluations + 1}"
        action = self.executor.where
        step = f"{step} of {type(self.model).__name__}" + (f", {action.in_words}" if action else "")
        return step if self.optimizer is None else step + self.optimizer.after_calls

    def _abort(self, task: PipelineStep) -> None:
        """After an error in a step: drop what it computed."""
        self.executor.rest = None
        if task.training and self.buckets is not None:
            self.buckets.abort()
        if self._sharded is not None:
            self._sharded.cancel()
        self.criterion_check.reduction = LossReduction.MEAN

    @contextmanager
    def _watched(self, batch: SplitBatch, training: bool) -> Iterator[None]:
        """A context for the passes of a step, in which the first steps are looked at."""
        with ExitStack() as stack:
            if self.first_step is not None:
                stack.enter_context(self.first_step.watched(self.model, batch, training))
            if self.kept_state is not None and training:
                stack.enter_context(self.kept_state.watching({one.num_samples for one in batch.microbatches}))
            if self.ways_check is not None:
                stack.enter_context(self.ways_check.watching())
            yield
        if training:
            self.first_step = None

    def _look_for_kept_state(self) -> None:
        """From the next training step on, look at what the forward keeps, until two calls have shown it."""
        self.kept_state = self.epilogue.kept_state = KeptStateCheck(self.staged, self.layout, self._reported_state)

    def _end_checks(self) -> None:
        """After a training step: end what looks at the first ones only."""
        if self.kept_state is not None and self.kept_state.end():
            self.kept_state = self.epilogue.kept_state = None

    def _refusal(self, training: bool) -> Exception | None:
        """Why the passes of a step that was looked at are refused on all ranks; None: they are not."""
        found = ""
        if training:
            checks = None if self.optimizer is None else self.optimizer.gradient_checks
            found = "" if checks is None else checks.refusal()
            if self.kept_state is not None:
                found = found or self.kept_state.refusal()
        if self.ways_check is not None and self.ways_check.is_active:
            found = self.ways_check.refusal() or found
        if not found:
            return None
        # Each rank ends an evaluation when it reads the loss, where they do not exchange words.
        return FoundInPassError(found) if training else ConfigError(found)

    def _leave_unfinished(
        self,
        batch: SplitBatch,
        task: PipelineStep,
        program: RankProgram,
        rest: RestOfStep,
        share_buffers: Callable[[PipelineStep], None],
    ) -> None:
        """Note what is left of a step that an error ended: the script may catch it, on this rank alone."""
        optimizer = self.optimizer if task.training else None
        self.unfinished = UnfinishedStep(
            batch,
            task,
            program,
            rest,
            self.buckets if task.training else None,
            self.epilogue,
            share_buffers,
            None if optimizer is None else optimizer.end_accumulation,
            self._abort,
        )

    def _interrupt(self, error: PeerError | DeadlockError) -> None:
        """Note the error that ended a step in the middle; where it came of calls that differ, raise that instead."""
        # Of this step, messages may come that the next one would take for its own.
        self.interruption.note(error)
        # After a timeout, the other rank may still not say anything. Where all ranks wait, nothing is on its way.
        if not isinstance(error, PeerTimeoutError):
            patience = Patience(0.0 if isinstance(error, DeadlockError) else _PATIENCE_S)
            self._reader.check_calls(patience)
            self.epilogue.check_calls(patience)
