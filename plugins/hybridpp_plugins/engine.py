"""The steps of boosted models: from the plugin's call to the actions of a program."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hybridpp.cluster import Section, microbatch_key, preserved_random_state, stream_seeder
from hybridpp.config import PipelineConfig
from hybridpp.errors import ClosedError, ConfigError, DeadlockError, PeerError, RefusedByPeerError
from hybridpp.nn import walk
from hybridpp.nn.force_eager import force_eager
from hybridpp.partition.compiled import is_compiled_by_script
from hybridpp.pipeline import (
    BatchUse,
    CriterionAdapter,
    ForwardSignature,
    LossReduction,
    PipelineStep,
    RankBatchInfo,
    RankProgram,
    ReplicaCounts,
    SplitBatch,
    StatisticsLook,
    StepResult,
)
from hybridpp.plugin import Criterion, RunsPipeline, StepOptions
from hybridpp_plugins.counted_loss import CountedLoss, counted
from hybridpp_plugins.coupled_loss import CoupledLoss, check_undivided
from hybridpp_plugins.engine_handle import ENGINE
from hybridpp_plugins.engine_parts import EngineParts
from hybridpp_plugins.folder_save import Saves
from hybridpp_plugins.interruption import Interruption
from hybridpp_plugins.layout import Layout
from hybridpp_plugins.step_epilogue import PendingEnd, items_of
from hybridpp_plugins.step_losses import StepLosses
from hybridpp_plugins.unfinished_step import UnfinishedStep

_FIRST_EVALUATION = 2**62
# Programs that are kept, of as many numbers of micro-batches; the least recently used is dropped.
_MAX_PROGRAMS = 256


def _nothing(*_: Any) -> None:
    pass


class PipelineRunner(RunsPipeline):
    """The part of a plugin that finds the engine of a boosted model, and runs its steps.

    Attributes:
        layout: the ranks and groups of the plugin.
    """

    layout: Layout
    _closed = False

    def __init__(self) -> None:
        self._saves = Saves()
        self._interruption = Interruption(self._saves.give_up)
        # The rest of a step that an error ended here, which other replicas are in.
        self._unfinished: UnfinishedStep | None = None
        # Of the passes that run.
        self._gradient_scale: Callable[[], float] | None = None

    @property
    def gradient_scale(self) -> float:
        """See :attr:`hybridpp.Booster.gradient_scale`."""
        return 1.0 if self._gradient_scale is None else self._gradient_scale()

    @contextmanager
    def _scaling(self, gradient_scale: Callable[[], float]) -> Iterator[None]:
        """Inside, passes run whose losses have this factor."""
        before, self._gradient_scale = self._gradient_scale, gradient_scale
        try:
            yield
        finally:
            self._gradient_scale = before

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Criterion | None,
        optimizer: Optimizer | None,
        options: StepOptions,
    ) -> dict[str, Any]:
        """See :meth:`hybridpp.Booster.execute_pipeline`."""
        engine = self._engine(model)
        try:
            _check_call(engine, criterion, optimizer, options)
            if self._saves.status.is_decided:  # all ranks learned it in the last step
                self._saves.wait()
            with (
                engine.on_plain_weights(),
                self.layout.world.progress.inside(engine.section, engine.location),
                self._scaling(lambda: engine.gradient_scale),
            ):
                return engine.step(data_iter, criterion, options)
        except (PeerError, DeadlockError) as error:
            self._interruption.lost_peer(error)
            raise
        finally:
            self._unfinished, engine.unfinished = engine.unfinished, None

    def _engine(self, model: nn.Module) -> "Engine":
        self._check_open()
        engine = vars(model).get(ENGINE) if isinstance(model, nn.Module) else None
        if not isinstance(engine, Engine) or engine.layout is not self.layout:
            raise ConfigError(
                f"this {type(model).__name__} was not boosted by this booster. Pass the model that booster.boost "
                "returned."
            )
        if engine.optimizer is not None and engine.optimizer.failed_pass is not None:
            engine.optimizer.failed_pass.finish()
        return engine

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(
                "this plugin was closed: its process groups are gone. Make a new plugin, and boost a model with it."
            )
        if self._interruption.cause is not None:
            self._interruption.refuse()
        if self._unfinished is not None:
            unfinished, self._unfinished = self._unfinished, None
            try:
                unfinished.finish()
            except Exception as error:
                self._interruption.note(error)
                raise


def _check_call(
    engine: "Engine", criterion: Criterion | None, optimizer: Optimizer | None, options: StepOptions
) -> None:
    """Refuse arguments of ``execute_pipeline`` that do not fit together, before anything is communicated."""
    if engine.original.uninitialized.is_pending:
        engine.original.uninitialized.check(engine.layout.control)
    training = torch.is_grad_enabled()
    if optimizer is not None and optimizer is not engine.optimizer:
        raise ConfigError("execute_pipeline needs the optimizer that booster.boost returned for this model.")
    if training and optimizer is None:
        raise ConfigError(
            "execute_pipeline needs the boosted optimizer if gradients are enabled. Pass optimizer=, or call it "
            "under torch.no_grad() to evaluate."
        )
    if criterion is None and (training or options.return_loss or options.return_losses):
        raise ConfigError(
            "execute_pipeline needs criterion(outputs, inputs) to compute a loss. Pass it, or return_loss=False "
            "under torch.no_grad()."
        )
    if training and criterion is not engine.criteria.known:
        engine.criteria.check(criterion)


def _counts_of(infos: list[RankBatchInfo]) -> ReplicaCounts:
    return ReplicaCounts([one.num_items for one in infos], [one.form for one in infos], [one.counts for one in infos])


class Engine(EngineParts):
    """Runs the steps of one boosted model on this rank."""

    @property
    def gradient_scale(self) -> float:
        """The factor on the loss of the micro-batch whose pass runs, in its gradient."""
        factor = 1.0 if self.optimizer is None else self.optimizer.hook_factor
        return self.executor.gradient_scale * factor

    @property
    def section(self) -> Section:
        """Of the next step: its first one, and the first evaluation, may compile and choose kernels."""
        num_done = self.progress.num_steps if torch.is_grad_enabled() else self.progress.num_evaluations
        return "step" if num_done else "setup"

    def step(self, data_iter: Iterator[Any], criterion: Criterion | None, options: StepOptions) -> dict[str, Any]:
        """One step of training, or of evaluation if gradients are disabled. Collective: all ranks."""
        self._stop.begin_step()
        self.is_training = training = torch.is_grad_enabled()
        has_losses = training or options.return_loss or options.return_losses
        called = self.signatures.of(criterion if has_losses else None)
        form_of = partial(called.form, training) if isinstance(called, CriterionAdapter) else None
        use = BatchUse(called, training, options.num_microbatches, form_of)
        if self.epilogue.evaluations.pending:
            self.epilogue.evaluations.wait(0 if training else 1)
        self.is_running = True
        self._mark("read")
        try:
            batch, infos, failure = self._reader.read(
                data_iter, use, self._check_trained if training else self._take_over, self.first_step
            )
            is_new = self._is_new(called, batch, infos, training)
            if not is_new:  # else it is not known yet what the next batch's items are
                self._reader.read_ahead(data_iter, use)
            if self.buckets is not None:
                self.buckets.are_in_step = len(self._counts(infos)) == 1
            losses: StepLosses | CountedLoss | None = self._step_losses(batch, infos, called, training, is_new)
            if losses is None:
                batch, losses = self._counted(batch, called, training)
            task = self._task(batch, infos, called, losses, options.return_outputs)
            if self._is_looked_at:
                task = self._looked_at(task, batch, infos, called)
            if training and self.kept_state is not None:
                self.kept_state.begin(self._counts(infos))
            if self.ways_check is not None:
                self.ways_check.begin(training)
            self._mark("actions")
            result, loss, num_items = self._run(
                batch, task, self._program(infos, training), failure, getattr(called, "identity", None), losses
            )
            if is_new:
                self._reader.read_ahead(data_iter, use)
            if losses is not None:
                batch = losses.weighted(batch)
            found: dict[str, Any] = {"outputs": None}
            if options.return_losses or options.return_outputs:
                if self._results.meets(options):
                    self.epilogue.evaluations.wait()
                found = self._results.of(batch, result, options)
        except RefusedByPeerError:
            raise
        except (PeerError, DeadlockError) as error:
            self._interrupt(error)
            raise
        finally:
            self.is_running = False
            self._mark("")
        if self.optimizer is not None and self.optimizer.modes is not None:
            self.optimizer.modes.passed()
        self._last_hook = RemovableHandle.next_id  # passes put hooks on tensors, too
        if training:
            if self.kept_state is not None:
                self._end_checks()
            self.progress.num_steps += 1
            self._stop.step_done()
        else:
            self.progress.num_evaluations += 1
        if not options.return_loss:
            loss = num_items = None
        return {"loss": loss, "num_items": num_items, **found}

    def _check_trained(self) -> None:
        if self.optimizer is not None:
            self.optimizer.target.check(self.model)
            if self.optimizer.held_before:
                self.optimizer.check_gradients_before_boost()
            if self.optimizer.modes is not None:
                self.optimizer.modes.look()

    def _take_over(self) -> None:
        if self.optimizer is not None:
            self.optimizer.target.take_over()

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
        losses: StepLosses | CountedLoss | None,
        keep_outputs: bool,
    ) -> PipelineStep:
        training = self.is_training
        replica_infos = self._replica_infos(infos)
        weights = losses.weights if losses is not None else batch.weights(_counts_of(replica_infos), self._loss_scale)
        # Evaluations have separate keys: each draws new random numbers, and training draws the same without them.
        run = self.progress.num_steps if training else _FIRST_EVALUATION + self.progress.num_evaluations
        coupled = self._coupled(called, batch, replica_infos, microbatch_key(self.progress.seed, run, 0))
        if coupled is not None:  # the gradients of the replicas' own outputs add up
            weights = [self._loss_scale]
        # Micro-batches are numbered over all replicas, so that replicas draw different random numbers.
        first_microbatch = sum(int(info.num_microbatches) for info in replica_infos[: self.layout.here.dp])
        loss_of = called if isinstance(called, CriterionAdapter) else None
        criterion: Criterion | None = coupled or losses or loss_of
        if training and criterion is not None and self._has_losses and self.criteria.is_unread:
            parts = None if self.optimizer is None else self.optimizer.weights_in_loss
            criterion = self.criteria.reading(criterion, parts)
        checks = self.optimizer.gradient_checks if training and self.optimizer else None
        if checks is not None and (RemovableHandle.next_id != self._last_hook or self._is_tried_again):
            checks.look(again=self._is_tried_again)
        if checks is not None and (not checks.is_first or self._is_whole(batch)):
            checks = None
        return PipelineStep(
            microbatches=batch.microbatches,
            loss_weights=weights,
            keys=[
                microbatch_key(self.progress.seed, run, first_microbatch + n) for n in range(len(batch.microbatches))
            ],
            criterion=criterion,
            training=training,
            keep_outputs=keep_outputs,
            begin_last_backward=self.buckets.begin_last_backward if self.buckets else lambda stage, pending: False,
            end_backward=self.buckets.end_backward if self.buckets else _nothing,
            reduce_gradients=self.buckets.launch_remaining if self.buckets else lambda stage: None,
            weights=self._sharded,
            max_stored_microbatches=self._max_stored,
            model_inputs=called.model_inputs,
            inspect_loss=self._inspecting(called, batch, infos) if losses is None else losses.inspect,
            watched=losses.watched if losses is not None else None,
            shares=losses.shares if losses is not None else None,
            is_coupled=isinstance(called, CriterionAdapter) and called.coupled,
            settle=_nothing if (first := coupled or losses) is None else first.settle,
            watched_forward=partial(checks.watching_forward, batch.microbatches[0].num_samples)
            if checks and not any(map(is_compiled_by_script, walk.modules(self.model)))  # it would be traced with it
            else None,
            checked=checks.trying if checks else None,
        )

    def _coupled(
        self, called: CriterionAdapter | ForwardSignature, batch: SplitBatch, infos: list[RankBatchInfo], key: int
    ) -> CoupledLoss | None:
        """A criterion that says that it couples samples, if there are other replicas' samples."""
        if not isinstance(called, CriterionAdapter) or not called.coupled:
            return None
        check_undivided(called, infos)
        if not self._has_losses or self.layout.dp.size == 1:
            return None
        control = self.layout.control if self.layout.pp.size == 1 else None
        sizes, seed = [int(info.num_items) for info in infos], stream_seeder(key, self.device)
        is_first, pipeline = self.first_step is not None, self._pipeline_of(batch)
        return CoupledLoss(
            called, self.layout.dp, sizes, pipeline, seed, is_first=is_first and self.is_training, control=control
        )

    def _replica_infos(self, infos: list[RankBatchInfo]) -> list[RankBatchInfo]:
        """Of a rank of each replica that computes losses."""
        return [infos[ranks[0]] for ranks in self._loss_ranks]

    def _is_new(
        self,
        called: CriterionAdapter | ForwardSignature,
        batch: SplitBatch,
        infos: list[RankBatchInfo],
        training: bool,
    ) -> bool:
        """Whether it must still be found what the loss is a mean over. The same on all ranks."""
        if (
            not isinstance(called, CriterionAdapter)
            or called.coupled
            or called.sums
            or (called.num_items and not batch.has_total)
        ):
            return False
        # In training, the loss is a mean over all replicas.
        num_averaged = (
            sum(int(info.num_microbatches) for info in self._replica_infos(infos))
            if training
            else max(self._counts(infos))
        )
        return num_averaged > 1 and not _counts_of(self._replica_infos(infos)).are_known

    @property
    def _is_looked_at(self) -> bool:
        """Whether the forward of this step is looked at, without its loss."""
        number = self.progress.num_evaluations
        return self._is_tried_again or self.first_step is not None if self.is_training else not number & (number + 1)

    def _looked_at(
        self,
        task: PipelineStep,
        batch: SplitBatch,
        infos: list[RankBatchInfo],
        called: CriterionAdapter | ForwardSignature,
    ) -> PipelineStep:
        """The same step, with what looks at statistics of samples and at what the forward keeps."""
        if self.is_training and self._is_tried_again:
            self._look_for_kept_state()
        if not isinstance(called, CriterionAdapter) or called.declares_reduction or called.coupled or called.sums:
            return task
        counts = [int(info.num_microbatches) for info in self._replica_infos(infos)]
        if sum(counts) == 1 or any(map(is_compiled_by_script, walk.modules(self.model))):
            return task
        given = [(one.inputs, one.num_samples) for one in batch.microbatches]
        report = partial(self.criterion_check.report, LossReduction.STATISTICS)
        return replace(task, watched_stage=StatisticsLook(given, batch.dims, report).watching)

    def _step_losses(
        self,
        batch: SplitBatch,
        infos: list[RankBatchInfo],
        called: CriterionAdapter | ForwardSignature,
        training: bool,
        is_new: bool,
    ) -> StepLosses | None:
        """What finds the form of the step's loss, or weighs its terms; None: this rank needs neither."""
        replicas = _counts_of(self._replica_infos(infos))
        replicas.check()
        form = batch.form
        is_watched = is_new or (form is not None and form.is_watched(one.counts for one in batch.microbatches))
        is_declared = getattr(called, "declares_reduction", True)
        # Without gradients there is no graph to compare: what may leave out terms is watched.
        is_watched = is_watched or (form is not None and form.branches and not (training or is_declared))
        is_one = len(batch.microbatches) == self.layout.dp.size == 1
        is_compared = training and not is_one and not is_declared
        self.criterion_check.comparison.begin(form if is_compared else None, [one.counts for one in batch.microbatches])
        # Without gradients there is no graph to compare: evaluations 2, 4, 8 and so on are watched again.
        number = self.progress.num_evaluations + 1
        looks_again = not (training or is_declared or number & (number - 1))
        # Numbers that the script has changed may be in what is counted: no graph shows these.
        has_others = isinstance(called, CriterionAdapter) and called.has_other_numbers(training, batch.has_total)
        looks_again = (looks_again or (has_others and not is_declared and (not training or is_compared))) and (
            form is not None and form.shows_divisors
        )
        # So are steps 4, 8 and so on: what scripts and models begin to do with samples together has a graph or none.
        tries_again = form is not None and (self._is_tried_again if is_compared else looks_again and not training)
        if not self._has_losses or not isinstance(called, CriterionAdapter):
            return None
        if not (is_watched or looks_again or tries_again):
            return None
        # A compiler that the script has called would trace what watches.
        is_compiled = any(map(is_compiled_by_script, walk.modules(self.model)))
        if is_compiled and not is_watched:
            return None
        return self._losses_of(
            called, batch, replicas, looks_again and not is_compiled, tries_again and not is_compiled
        )

    @property
    def _is_tried_again(self) -> bool:
        """Whether what is tried in the first step of training is tried in this one, too."""
        number = self.progress.num_steps + 1
        return number > 2 and not number & (number - 1)

    def _losses_of(
        self,
        called: CriterionAdapter,
        batch: SplitBatch,
        replicas: ReplicaCounts,
        looks_again: bool = False,
        tries_again: bool = False,
        begins: bool = True,
    ) -> StepLosses:
        is_compiled = any(map(is_compiled_by_script, walk.modules(self.model)))
        training = self.is_training
        return StepLosses(
            called,
            batch,
            replicas,
            check=self.criterion_check,
            pipeline=self._pipeline_of(batch),
            group=self.layout.dp if training and self.layout.dp.size > 1 else None,
            scale=self._loss_scale,
            device=self.device,
            around=force_eager if is_compiled else nullcontext,
            looks_again=looks_again,
            tries_again=tries_again,
            begins=begins,
        )

    def _pipeline_of(self, batch: SplitBatch) -> PipelineConfig:
        """The settings, with the dimensions of samples that the batch shows itself."""
        given = self.pipeline.batch_dims or 0
        return self.pipeline if batch.dims is given else replace(self.pipeline, batch_dims=batch.dims)

    def _inspecting(
        self, called: CriterionAdapter | ForwardSignature, batch: SplitBatch, infos: list[RankBatchInfo]
    ) -> Callable[[int, Tensor, Any, Any], tuple[Tensor | None, Tensor | None]]:
        """What compares the losses of a step in which none is watched with the one whose form is known."""
        comparison, form = self.criterion_check.comparison, batch.form
        if not isinstance(called, CriterionAdapter) or form is None:
            return comparison.inspect

        def inspect(microbatch: int, loss: Tensor, outputs: Any, inputs: Any) -> tuple[Tensor | None, Tensor | None]:
            found = comparison.inspect(microbatch, loss, outputs, inputs)
            if form.others:
                losses = self._losses_of(called, batch, _counts_of(self._replica_infos(infos)), begins=False)
                losses.try_others(microbatch, loss, outputs, inputs)
            return found

        return inspect

    def _counted(
        self, batch: SplitBatch, called: CriterionAdapter | ForwardSignature, training: bool
    ) -> tuple[SplitBatch, CountedLoss | None]:
        """The batch with the number of items of its loss, where no weight depends on it; or what finds that number."""
        if (
            not self._has_losses
            or not isinstance(called, CriterionAdapter)
            or batch.form is not None
            or len(batch.microbatches) != 1
            or called.coupled
            or called.sums
            or called.num_items
        ):
            return batch, None
        form = called.reported_form(training, batch.has_total)
        if form is not None:
            return counted(batch, form), None
        if any(map(is_compiled_by_script, walk.modules(self.model))):  # it would be traced with what watches
            return batch, None
        weights = batch.weights(ReplicaCounts([batch.num_items], [0.0], [()]), self._loss_scale)
        return batch, CountedLoss(called, batch, self._pipeline_of(batch), weights)

    @property
    def _loss_scale(self) -> float:
        return 1.0 if self.optimizer is None else self.optimizer.loss_scale

    def _run(
        self,
        batch: SplitBatch,
        task: PipelineStep,
        program: RankProgram,
        failure: Exception | None,
        identity: Any,
        losses: StepLosses | CountedLoss | None,
    ) -> tuple[StepResult, Tensor | None, Tensor | None]:
        """Run all micro-batches, then the end of the step. Collective: all ranks."""
        optimizer = self.optimizer if task.training else None
        if optimizer is not None:
            optimizer.begin_accumulation()
        end: PendingEnd | None = None
        result: StepResult | None = None

        def losses_known(result: StepResult) -> None:
            nonlocal end
            weighted = batch if losses is None else losses.weighted(batch)
            end = self.epilogue.begin(weighted, result, task, failure)

        try:
            with preserved_random_state(self.device):
                # Without pipelines, the other replicas learn with the losses whether this one got through the passes.
                early = task.criterion is not None and self.layout.pp.size > 1
                with self._checked(batch, task) as is_checked:
                    early = early and not (is_checked or self._looks_at_ways)  # they learn what is found, too
                    result = self._execute(batch, task, program, losses_known if early else _nothing)
            if is_checked or self._looks_at_ways:
                failure = failure or self._refusal(task.training)
            self._mark("end")
            if task.criterion is not None and end is None:
                losses_known(result)
            if optimizer is not None:
                optimizer.end_accumulation()
            if end is None and failure is not None:  # there is no message that would tell of it
                raise failure
            loss = None if end is None else self.epilogue.loss(end, program, task, failure, identity)
            num_items = None if end is None or loss is None else items_of(end, loss)
        except BaseException as error:
            rest = self.executor.rest if result is None else None
            is_alone = self.layout.dp.size == 1 or self.layout.pp.size > 1
            if rest is None or is_alone or isinstance(error, PeerError | DeadlockError):
                self._abort(task)
            else:
                self._leave_unfinished(batch, task, program, rest, self._share_buffers)
            raise
        return result, loss, num_items

    def _checked(self, batch: SplitBatch, task: PipelineStep) -> AbstractContextManager[bool]:
        """A context for passes, in which code is tried that is called for parts of the batch; whether any is."""
        checks = self.optimizer.gradient_checks if self.optimizer and task.training else None
        has_hooks = self.buckets is not None and self.buckets.has_hooks
        in_parts = not self._is_whole(batch)
        is_tried = in_parts or (has_hooks and self.layout.tp.size > 1)
        if checks is None or not is_tried or not (checks.is_first or has_hooks):
            return nullcontext(task.training and self.kept_state is not None and self.kept_state.is_active)
        return checks.watching(has_hooks=has_hooks, in_parts=in_parts)

    @property
    def _looks_at_ways(self) -> bool:
        return self.ways_check is not None and self.ways_check.is_active

    def _is_whole(self, batch: SplitBatch) -> bool:
        """Whether the batches of all replicas are one micro-batch."""
        return len(batch.microbatches) * self.layout.dp.size == 1

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
        if self.statistics.is_needed:
            self.statistics.begin()
        buffers = self.optimizer.replica_buffers if task.training and self.optimizer else None
        if buffers is not None:
            buffers.begin()
        is_watched = self.first_step is not None or (self.kept_state is not None and self.kept_state.is_active)
        is_watched = is_watched or self._looks_at_ways
        with self._noted(), self._watched(batch, task.training) if is_watched else nullcontext():
            result = self.executor.run(program, task, recorder, losses_known)
        self._share_buffers(task)
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
                self.interruption.note(error)
            raise

    def _mark(self, phase: str) -> None:
        """Note where in the step the rank is, if it is recorded."""
        if self.recording is not None:
            self.recording.recorder.mark(phase)
