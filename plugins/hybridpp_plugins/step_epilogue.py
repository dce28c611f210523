"""The end of a step: one message of each rank, with its losses and, if the optimizer needs it, the gradient norm."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hybridpp.cluster import Group, HostCopy, Patience, gather_numbers, name_ranks
from hybridpp.errors import ConfigError, DeadlockError, PeerError, UnlikeCallsError
from hybridpp.nn.deferred_tensor import DeferredTensor, deferred
from hybridpp.pipeline import LossReduction, PipelineStep, RankProgram, SplitBatch, StepResult, check_equal, step_call
from hybridpp.pipeline.rest_of_step import EndedInsideError
from hybridpp_plugins.background_save import SaveStatus
from hybridpp_plugins.coupled_loss import check_alike
from hybridpp_plugins.criterion_check import CriterionCheck
from hybridpp_plugins.kept_state_check import KeptStateCheck
from hybridpp_plugins.layout import Layout
from hybridpp_plugins.loss_exchange import EvaluationLosses, LossExchange, MessageOf
from hybridpp_plugins.manual_clipping import ManualScaling
from hybridpp_plugins.optimizer import HybridOptimizer
from hybridpp_plugins.optimizer_step import SharedModes
from hybridpp_plugins.weight_check import WeightCheck

NOT_USED = "The step was refused, and no weight was changed with them."
"""Of settings that differ, in errors."""

_NUM_OF_SCALING = len(ManualScaling._fields)
_NO_NUMBERS = torch.empty(0, dtype=torch.float64)


class FoundInPassError(ConfigError):
    """What this rank has found in the passes of a step, which is raised on all ranks.

    Attributes:
        code: that ranks report of it.
    """

    code = 3.0


class BadLoss(NamedTuple):
    """A loss that is NaN or infinite.

    Attributes:
        value: NaN or an infinity.
        microbatch: index of the micro-batch in its replica.
        rank: the rank that computed it.
    """

    value: float
    microbatch: int
    rank: int


class OptimizerCalls(NamedTuple):
    """How often the script has called the optimizer on a rank.

    Attributes:
        num_passes: calls of ``execute_pipeline`` and ``backward`` whose gradients add up, with the one that runs.
        applied_steps: steps that were taken.
        digest: of the calls since the training step before, see
            :class:`~hybridpp_plugins.optimizer_step.ScriptCalls`; -1: not compared.
    """

    num_passes: float = 0.0
    applied_steps: float = 0.0
    digest: float = -1.0


class RankReport(NamedTuple):
    """What a rank reports of a step besides its losses.

    Attributes:
        failed: 1 if this rank refuses the step, 2 if an error ended it between its actions, 3 if all ranks refuse it
            with the words of this one.
        reduction: of the criterion.
        scaled: how the script scaled gradients.
        calls: of the optimizer.
        digest: of what ranks still compare of their batches; -1: nothing.
        wrote_buffer: 1 if a forward pass has written here to a buffer that was not written to before.
        save: how far a save in the background is, see :class:`~hybridpp_plugins.background_save.SaveOutcome`.
        stop: number of the signal that told this rank to stop; 0: none.
        weights: hashes of what other ranks have copies of, see :class:`~hybridpp_plugins.weight_check.WeightCheck`;
            negative: the step is not checked.
        settings: digest of the optimizer's settings, see :class:`~hybridpp_plugins.optimizer_step.GroupSettings`; in
            evaluation of the model's modes, see :class:`~hybridpp_plugins.optimizer_step.SharedModes`; -1: neither.
        cleared: digest of the names whose gradients the script had set to None at the last step; 0: there were none.
        divided: what losses are divided by, over what was counted; 0: it does not show.
        modes: digest of what the script has set on the model, see
            :class:`~hybridpp_plugins.optimizer_step.ModelModes`; 0: nothing since boost.
        keeps_state: 1 if it was found here that the forward keeps something for its next call.
    """

    failed: float = 0.0
    reduction: float = float(LossReduction.MEAN)
    scaled: ManualScaling = ManualScaling()
    calls: OptimizerCalls = OptimizerCalls()
    digest: float = -1.0
    wrote_buffer: float = 0.0
    save: float = 0.0
    stop: float = 0.0
    weights: tuple[float, ...] = (-1.0, -1.0, -1.0)
    settings: float = -1.0
    cleared: float = 0.0
    divided: float = 0.0
    modes: float = 0.0
    keeps_state: float = 0.0

    def numbers(self) -> list[float]:
        """All of it as numbers."""
        rest = self.digest, self.wrote_buffer, self.save, self.stop, *self.weights, self.settings, self.cleared
        first = self.failed, self.reduction, *self.scaled, *self.calls
        return [*first, *rest, self.divided, self.modes, self.keeps_state]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "RankReport":
        """The report, from its numbers."""
        failed, reduction, *after = numbers
        num_passes, applied_steps, called, *rest = after[_NUM_OF_SCALING:]
        digest, wrote_buffer, save, stop, *weights, settings, cleared, divided, modes, keeps_state = rest
        scaled, calls = ManualScaling(*after[:_NUM_OF_SCALING]), OptimizerCalls(num_passes, applied_steps, called)
        first = failed, reduction, scaled, calls, digest, wrote_buffer, save, stop
        return cls(*first, tuple(weights), settings, cleared, divided, modes, keeps_state)


class RankLoss(NamedTuple):
    """What a rank reports of its losses; zeros if it computes none.

    Attributes:
        loss: of the batch.
        bad_loss: the first loss of a micro-batch that is inf or NaN.
        bad_microbatch: index of that micro-batch; -1: there is none.
        num_items: that the loss is a mean over.
    """

    loss: float
    bad_loss: float
    bad_microbatch: float
    num_items: float = 0.0


class StepSummary(NamedTuple):
    """What every rank knows at the end of a step.

    Attributes:
        loss: of this replica's batch.
        losses: of the batch of each replica.
        num_items: that it is a mean over.
        bad_loss: the first one over all replicas; None: all are finite.
        reduction: of the criterion; the most severe finding of any rank.
        unequal: different losses of tensor-parallel ranks, by rank; empty: they are equal.
        reports: by rank.
    """

    loss: float
    losses: Sequence[float]
    num_items: float
    bad_loss: BadLoss | None
    reduction: LossReduction
    unequal: Mapping[int, float]
    reports: Sequence[RankReport]

    @property
    def is_clean(self) -> bool:
        """Whether no rank reports a problem; digests are not looked at."""
        first = self.reports[0]
        return (
            self.bad_loss is None
            and not self.unequal
            and self.reduction is LossReduction.MEAN
            and not any(one.failed or one.scaled.factor > 0 or any(one.scaled[2:]) for one in self.reports)
            and not any(one.calls != first.calls or one.settings != first.settings for one in self.reports)
        )

    @property
    def failed(self) -> list[int]:
        """The ranks that refuse the step."""
        return [rank for rank, report in enumerate(self.reports) if report.failed]

    @property
    def digests(self) -> list[float | None]:
        """Of what ranks still compare of their batches, by rank; None: nothing."""
        return [None if report.digest < 0 else report.digest for report in self.reports]


_NUM_OF_REPORT = len(RankReport().numbers())
NUM_WITHOUT_NORM = _NUM_OF_REPORT + len(RankLoss._fields)
"""How many numbers of a message precede those of the gradient norm."""


def message_of(
    batch: SplitBatch, result: StepResult, losses: Sequence[float], report: RankReport, num_items: float = 0.0
) -> list[float]:
    """This rank's message, :data:`NUM_WITHOUT_NORM` numbers; ``losses`` are the result's, in host memory."""
    return [*report.numbers(), *_rank_loss(batch, result, losses)._replace(num_items=num_items)]


def _rank_loss(batch: SplitBatch, result: StepResult, losses: Sequence[float]) -> RankLoss:
    computed = {index: value for index, value in enumerate(losses) if result.has_loss[index]}
    parts = [value * batch.microbatches[index].share for index, value in computed.items()]
    for index, value in computed.items():
        if not math.isfinite(value):
            # math.fsum raises for infinities of both signs.
            return RankLoss(sum(parts), value, index)
    return RankLoss(math.fsum(parts), 0.0, -1.0)


def summary_of(messages: Sequence[Sequence[float]], last_stages: Sequence[Sequence[int]], own_last: int) -> StepSummary:
    """What the messages of all ranks come to.

    Args:
        messages: by rank; what follows the first :data:`NUM_WITHOUT_NORM` numbers is not read.
        last_stages: by replica, the tensor-parallel ranks of the last stage, which compute the same losses.
        own_last: the first of these in this rank's replica.
    """
    reports = [RankReport.of(message[:_NUM_OF_REPORT]) for message in messages]
    losses = {
        rank: RankLoss(*messages[rank][_NUM_OF_REPORT:NUM_WITHOUT_NORM]) for ranks in last_stages for rank in ranks
    }
    bad_losses = (
        BadLoss(one.bad_loss, int(one.bad_microbatch), rank) for rank, one in losses.items() if one.bad_microbatch >= 0
    )
    return StepSummary(
        loss=losses[own_last].loss,
        losses=[losses[ranks[0]].loss for ranks in last_stages],
        num_items=losses[own_last].num_items,
        bad_loss=next(bad_losses, None),
        reduction=_reduction(reports),
        unequal=_unequal({rank: one.loss for rank, one in losses.items()}, last_stages),
        reports=reports,
    )


def _reduction(reports: Sequence[RankReport]) -> LossReduction:
    """The most severe finding of any rank."""
    found = LossReduction(int(max(one.reduction for one in reports)))
    divided = [one.divided for one in reports if one.divided]
    is_alike = not divided or math.isclose(min(divided), max(divided), rel_tol=0.01)
    return found if found is not LossReduction.MEAN or is_alike else LossReduction.CHANGED


def _unequal(losses_at: Mapping[int, float], last_stages: Sequence[Sequence[int]]) -> dict[int, float]:
    """The losses of the first replica whose tensor-parallel ranks have different ones, by rank; empty: none."""
    for ranks in last_stages:
        # Compared as text, so that NaN equals NaN.
        if len({repr(losses_at[rank]) for rank in ranks}) > 1:
            return {rank: losses_at[rank] for rank in ranks}
    return {}


def check_cleared(cleared: Sequence[float], alike: Sequence[Sequence[int]]) -> None:
    """Refuse to go on after the script set gradients to None on some only of the ranks that hold the parameters.

    Args:
        cleared: by rank, see :class:`RankReport`.
        alike: lists of ranks that hold the same parameters, or shards of the same.

    Raises:
        UnlikeCallsError: it did.
    """
    for ranks in alike:
        if len({cleared[rank] for rank in ranks}) > 1:
            here = [rank for rank in ranks if cleared[rank]]
            raise UnlikeCallsError(
                "all ranks that hold a parameter must give it a gradient, or none: at the last step, the script had "
                f"set parameter.grad to None on {name_ranks(here)}, of {name_ranks(ranks)}, or to None of other "
                "parameters there. Set it to None on all of them. Their weights no longer fit together: load a "
                "checkpoint on all ranks."
            )


def calls_of(optimizer: HybridOptimizer, *, training: bool) -> OptimizerCalls:
    """What the script has called of an optimizer; in training, calls count from now on for the next message."""
    passes, steps = optimizer.accumulated.num_passes, optimizer.applied_steps
    return OptimizerCalls(passes, steps, optimizer.calls.take()) if training else OptimizerCalls(passes, steps)


HandleProblems: TypeAlias = Callable[[StepSummary, RankProgram, PipelineStep, Exception | None], None]
"""Raises, warns or repairs; collective."""


class StepEpilogue:
    """Ends every step of one boosted model.

    Every rank gets the losses of all ranks and, if the optimizer needs it, every rank's part of the gradient norm; the
    host waits for the device at most once. Losses alone are exchanged as soon as they are computed, while backward
    passes run, so that no rank waits for another's last action. Problems (inf or NaN, a criterion that returns a sum,
    gradients clipped by the script) are handled on every rank in the same way; a clean step runs none of that code.

    Args:
        model_name: of the model, in errors.
        layout: the ranks.
        placement: the rank of every stage in its pipeline.
        optimizer: the boosted optimizer, if there is one.
        criterion_check: checks criteria on this rank.
        handle_problems: called for a step that is not clean, and for one that this rank refuses, with the reason.
        device: of the losses that are returned.

    Attributes:
        saves: the save in the background, of which a step tells the other ranks; None: nothing is told.
        evaluations: the losses of evaluations.
        weight_check: compares copies of weights in some steps; None: in none.
        modes: of the model, which ranks compare in evaluation; None: nothing.
        kept_state: tells what the forward keeps for its next call; None: nothing.
    """

    def __init__(
        self,
        model_name: str,
        layout: Layout,
        placement: tuple[int, ...],
        optimizer: HybridOptimizer | None,
        criterion_check: CriterionCheck,
        handle_problems: HandleProblems,
        device: torch.device,
    ):
        self._control, self._stop = layout.control, layout.world.stop
        self._pipelines = layout.pipelines
        # By replica, the tensor-parallel ranks of the last stage, which compute the same losses.
        self._last_stages = [layout.ranks_at(replica, placement[-1]) for replica in range(layout.grid.dp_size)]
        # The ranks that hold the same parameters, or shards of the same.
        self._of_stages = (*layout.grid.groups("dp"), *layout.grid.groups("tp"))
        self._own_last = self._last_stages[layout.here.dp][0]
        self._optimizer = optimizer
        self._criterion_check = criterion_check
        self._handle_problems = handle_problems
        self._device = device
        self.saves: SaveStatus | None = None
        self.weight_check: WeightCheck | None = None
        self.modes: SharedModes | None = None
        self.kept_state: KeptStateCheck | None = None
        self.evaluations = EvaluationLosses(device)
        self._latest: LossExchange | None = None
        self._calls = {training: f"at the end of {step_call(model_name, training)}" for training in (True, False)}

    def begin(
        self, batch: SplitBatch, result: StepResult, task: PipelineStep, failure: Exception | None
    ) -> "PendingEnd":
        """Begin the end of a step, when this rank's losses are computed. Collective: all ranks.

        Args:
            batch: of this rank.
            result: of the step on this rank, as far as there is one.
            task: the step that runs.
            failure: why this rank refuses the step; None: it does not.
        """
        optimizer = self._optimizer if task.training else None
        detector = self._optimizer.accumulated.clip_detector if self._optimizer else None
        report = RankReport(
            failed=failure.code
            if isinstance(failure, EndedInsideError | FoundInPassError)
            else float(failure is not None),
            reduction=float(self._criterion_check.reduction),
            scaled=detector.report() if detector else ManualScaling(),
            calls=OptimizerCalls() if self._optimizer is None else calls_of(self._optimizer, training=task.training),
            wrote_buffer=float(optimizer is not None and optimizer.has_new_buffers),
            save=0.0 if self.saves is None or self.saves.current is None else float(self.saves.current.outcome),
            stop=float(self._stop.own),
            cleared=0.0 if optimizer is None else optimizer.cleared_digest,
            modes=0.0 if optimizer is None or optimizer.modes is None else optimizer.modes.digest,
            keeps_state=float(task.training and self.kept_state is not None and self.kept_state.has_found),
            settings=-1.0 if task.training or self.modes is None else self.modes.number(),
        )

        losses = result.losses.double() if any(result.has_loss) else _NO_NUMBERS
        num_losses = losses.numel()
        settings = None if optimizer is None else optimizer.group_settings
        # In the copy of the losses, so that the host does not wait for the device once more.
        hashes = _NO_NUMBERS
        if optimizer is not None and self.weight_check is not None and self.weight_check.is_due:
            hashes = self.weight_check.hashes(self._device)
        own_settings = [] if settings is None else settings.on_device()
        items = batch.reported_items if num_losses else 0.0
        own_items = items.double().reshape(1) if isinstance(items, Tensor) else _NO_NUMBERS
        comparison = self._criterion_check.comparison
        counts = torch.stack(comparison.counts) if comparison.counts else _NO_NUMBERS
        if parts := [part for part in (hashes, own_items, counts, *own_settings) if part.numel()]:
            losses = torch.cat([losses, *parts] if num_losses else parts)

        def message(numbers: list[float], digest: float) -> list[float]:
            end_of_hashes = num_losses + hashes.numel()
            before = end_of_hashes + own_items.numel()
            after = before + counts.numel()
            reduction, divided = comparison.close(numbers[:num_losses], numbers[before:after])
            own = report._replace(
                reduction=max(report.reduction, float(reduction)),
                digest=digest,
                weights=tuple(numbers[num_losses:end_of_hashes]) or report.weights,
                divided=divided,
            )
            if settings is not None:
                own = own._replace(settings=settings.digest(numbers[after:]))
            num_items = numbers[end_of_hashes] if isinstance(items, Tensor) else items
            own_losses = numbers[:num_losses]
            if not task.training and num_items == 0.0:
                # Of a batch without items: 0 divided by 0.
                own_losses = [0.0 if math.isnan(loss) else loss for loss in own_losses]
            return message_of(batch, result, own_losses, own, num_items)

        call = self._calls[task.training]
        if optimizer and optimizer.sends_norm_with_loss:
            return _WithNorm(self._control, call, losses, batch.unchecked, message, optimizer)
        self._latest = LossExchange(self._control, call, losses, batch.unchecked, message)
        return self._latest

    def loss(
        self, pending: "PendingEnd", program: RankProgram, task: PipelineStep, failure: Exception | None, identity: Any
    ) -> Tensor:
        """The loss of this replica's batch, a scalar; in evaluation a tensor that waits for it when it is read.

        Args:
            pending, program, task, failure: see :meth:`close`.
            identity: of the criterion.

        Raises:
            Exception: see :meth:`close`; in evaluation, see :meth:`EvaluationLosses.loss`.
        """
        close = partial(self.close, pending, program, task, failure)
        if task.training:
            return close()
        assert isinstance(pending, LossExchange), "there is no norm"
        return self.evaluations.loss(pending, close, identity)

    def check_calls(self, patience: Patience) -> None:
        """Raise if the end of an earlier step shows that ranks are in different calls.

        Call it when another rank is gone: its error may be that, and this rank has not waited for the exchange yet.

        Args:
            patience: with messages that are not here yet.

        Raises:
            UnlikeCallsError: they are.
        """
        with suppress(PeerError, DeadlockError):
            messages = () if self._latest is None else self._latest.check_calls(patience)
            digests = [RankReport.of(message[:_NUM_OF_REPORT]).calls.digest for message in messages]
            if self._optimizer is not None and not self._optimizer.calls.are_alike(digests):
                raise self._optimizer.calls.unlike(digests)
            self.evaluations.check_calls(patience)

    def close(
        self, pending: "PendingEnd", program: RankProgram, task: PipelineStep, failure: Exception | None
    ) -> Tensor:
        """The loss of this replica's batch, a scalar on the device; the optimizer gets the norm.

        Collective: all ranks; one small all-gather of host memory, unless it is under way.

        Args:
            pending: from :meth:`begin`.
            program: that ran the step.
            task: the step that was run.
            failure: why this rank refuses the step.

        Raises:
            DataError: ranks of a pipeline hold other values of the batch on their devices.
            ConfigError: the criterion returns a sum, it is coupled and replicas have unlike losses, or the script
                clipped gradients by each rank's own norm.
            NonFiniteLossError: in training, a loss is inf or NaN.
            UnequalRanksError: tensor-parallel ranks computed different losses, or ranks have other settings of the
                optimizer, other modes of what all of them have of the model, or of parts whose parameters they share;
                raised on all ranks.
            PeerError: other ranks refuse the step.
            UnequalWeightsError: copies of a weight differ; raised on all ranks.
            UnlikeCallsError: ranks are in different calls, called the optimizer differently, or set gradients of other
                parameters to None; raised on all of them.
            Exception: ``failure``.
        """
        summary = summary_of(pending.wait(), self._last_stages, self._own_last)
        pending.num_items = summary.num_items
        if task.training:  # all ranks wait for it here; in evaluation, each when it reads the loss
            self._stop.heard(report.stop for report in summary.reports)
        optimizer = self._optimizer if task.training else None
        has_overflow = optimizer is not None and optimizer.sends_norm_with_loss and optimizer.wants_report
        if failure is not None or has_overflow or not summary.is_clean:
            self._handle_problems(summary, program, task, failure)
        else:
            check_equal(summary.digests, self._pipelines)
        if task.is_coupled:
            check_alike(summary.losses)
        if optimizer is not None and optimizer.modes is not None and any(report.modes for report in summary.reports):
            call = f"{self._calls[True]}, with other modes of the model"
            optimizer.modes.check([report.modes for report in summary.reports], call, NOT_USED)
        if optimizer is not None and any(report.cleared for report in summary.reports):
            check_cleared([report.cleared for report in summary.reports], self._of_stages)
        if optimizer is not None and self.weight_check is not None:
            self.weight_check.compare([report.weights for report in summary.reports])
        if optimizer is not None and optimizer.replica_buffers is not None:
            optimizer.replica_buffers.agree(any(report.wrote_buffer for report in summary.reports))
        if self.kept_state is not None and any(report.keeps_state for report in summary.reports):
            self.kept_state.tell()
        if optimizer is not None and self.saves is not None and self.saves.current is not None:
            self.saves.heard([report.save for report in summary.reports])
        return torch.tensor(summary.loss, dtype=torch.float32).to(self._device, non_blocking=True)


class _WithNorm:
    """The exchange of losses and norms, when all gradients are complete."""

    num_items = 0.0

    def __init__(
        self,
        control: Group,
        call: str,
        losses: Tensor,
        unchecked: Sequence[Tensor],
        message_of: MessageOf,
        optimizer: HybridOptimizer,
    ):
        self._control, self._call, self._losses, self._unchecked = control, call, losses, unchecked
        self._message_of, self._optimizer = message_of, optimizer

    def wait(self) -> Sequence[Sequence[float]]:
        """The messages of all ranks; the optimizer gets the norm."""
        optimizer, parts = self._optimizer, self._optimizer.norm_parts()
        # All in one copy: this is the step's only wait for the device.
        joined = [self._losses, parts, optimizer.unread_flags()]
        numbers, digest = HostCopy(joined, self._unchecked, early=False).read()
        before = self._losses.numel()
        after = before + parts.numel()
        optimizer.take_flags(numbers[after:])
        message = [*self._message_of(numbers[:before], digest), *optimizer.norm.message(numbers[before:after])]
        messages = gather_numbers(self._control, self._call, message)
        optimizer.accumulated.set_norm([numbers[NUM_WITHOUT_NORM:] for numbers in messages])
        return messages


PendingEnd = LossExchange | _WithNorm


def items_of(end: PendingEnd, loss: Tensor) -> Tensor:
    """The number of items of a loss, float64 in host memory; in evaluation it waits for the loss when it is read."""
    if not isinstance(loss, DeferredTensor):
        return torch.tensor(end.num_items, dtype=torch.float64)

    def make() -> Tensor:
        loss.values_now()
        return torch.tensor(end.num_items, dtype=torch.float64)

    return deferred(torch.empty(()), make, dtype=torch.float64, device=torch.device("cpu"))
