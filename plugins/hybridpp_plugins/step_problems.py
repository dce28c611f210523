"""What ranks do about the problems that they find at the end of a step. A step without problems calls nothing here."""

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from hybridpp.cluster import Group, gather_numbers, gather_objects, get_dist_logger, name_ranks
from hybridpp.errors import ConfigError, NonFiniteLossError, RefusedByPeerError, UnlikeCallsError
from hybridpp.partition import StagedModel
from hybridpp.pipeline import EndedInsideError, LossReduction, PipelineStep, RankProgram, check_equal
from hybridpp_plugins.criterion_check import CriterionCheck
from hybridpp_plugins.optimizer import HybridOptimizer
from hybridpp_plugins.optimizer_step import SharedModes
from hybridpp_plugins.step_epilogue import NOT_USED, BadLoss, FoundInPassError, OptimizerCalls, StepSummary
from hybridpp_plugins.tp_loss_check import TensorParallelLossCheck

_NOT_SAVED = "Nothing was saved."
_OTHER_WORDS = "at the end of a step, which tells why it is refused"
_OTHER_CALLS = "at the end of a step, after other calls of the optimizer"

Diagnose: TypeAlias = Callable[[RankProgram, PipelineStep, BadLoss | None], str]
"""Finds the first inf or NaN of a step by running it again; collective."""


class StepProblems:
    """Handles the problems of the steps of one boosted model, on every rank in the same way.

    Args:
        staged: the model.
        pipelines: groups of ranks that must hold the same batch.
        optimizer: the boosted optimizer, if there is one.
        criterion_check: checks criteria on this rank.
        diagnose: finds the first inf or NaN of a step.
        control: all ranks; None: reasons stay where they were found.
    """

    def __init__(
        self,
        staged: StagedModel,
        pipelines: tuple[tuple[int, ...], ...],
        optimizer: HybridOptimizer | None,
        criterion_check: CriterionCheck,
        diagnose: Diagnose,
        control: Group | None = None,
    ):
        self._control = control
        self._staged, self._pipelines, self._optimizer = staged, pipelines, optimizer
        self._criterion_check, self._diagnose = criterion_check, diagnose
        self._tp_loss_check = TensorParallelLossCheck()
        self._has_warned = False

    def handle(self, summary: StepSummary, program: RankProgram, step: PipelineStep, failure: Exception | None) -> None:
        """Raise, warn or repair. Collective: all ranks, with the same summary.

        Args:
            summary: of the step.
            program: that ran the step.
            step: that was run.
            failure: why this rank refuses the step.

        Raises:
            Exception: see :meth:`hybridpp_plugins.step_epilogue.StepEpilogue.close`.
        """
        if self._control is not None and any(one.failed == FoundInPassError.code for one in summary.reports):
            words = str(failure) if isinstance(failure, FoundInPassError) else ""
            raise ConfigError(next(filter(None, gather_objects(self._control, _OTHER_WORDS, words))))
        if failure is not None:
            raise failure
        ended = [rank for rank, report in enumerate(summary.reports) if report.failed == EndedInsideError.code]
        if ended:
            raise RefusedByPeerError(
                f"a step ended in the middle on {name_ranks(ended)}, by an error that the script "
                "caught there. It counts on no rank: gradients that were added up are dropped. If the script catches "
                "this error, too, and goes on with its next batch, that step is right. To leave out a batch, check it "
                "before booster.execute_pipeline, on all ranks alike."
            )
        if summary.failed:
            raise RefusedByPeerError(
                f"the step was refused on {name_ranks(summary.failed)}. See the error printed there."
            )
        calls = [report.calls for report in summary.reports]
        check_optimizer_calls(calls)
        if self._optimizer and step.training:
            self._optimizer.calls.check([one.digest for one in calls], _OTHER_CALLS)
        settings = self._optimizer.group_settings if self._optimizer and step.training else None
        if settings:
            own = [report.settings for report in summary.reports]
            settings.check(own, "at the end of a step, with other settings of the optimizer", NOT_USED)
        if not step.training:
            SharedModes.check_evaluation([report.settings for report in summary.reports])
        check_equal(summary.digests, self._pipelines)
        if summary.reduction is not LossReduction.MEAN:
            if step.training and self._control is not None:  # evaluations end when a rank reads their loss
                self._criterion_check.share_words(self._control)
            self._criterion_check.raise_or_warn(summary.reduction, type(self._staged.model).__name__)
        detector = self._optimizer.accumulated.clip_detector if self._optimizer else None
        if detector:
            detector.check([report.scaled for report in summary.reports])
        if summary.bad_loss is not None:
            self._report_bad_loss(summary.bad_loss, program, step)
        if summary.unequal:
            # Once: on some devices, losses of ranks differ by rounding in every step.
            if self._staged.part_reads is not None and not self._tp_loss_check.has_warned:
                self._staged.part_reads.again()
            self._tp_loss_check.check(summary.unequal)
        optimizer = self._optimizer if step.training else None
        if optimizer and optimizer.sends_norm_with_loss and optimizer.wants_report:
            optimizer.nonfinite_steps.found(self._diagnose(program, step, None))
            if detector:  # the diagnosis has restored the gradients, which is not a change by the script
                detector.record()

    def _report_bad_loss(self, bad: BadLoss, program: RankProgram, step: PipelineStep) -> None:
        """Raise in training; in evaluation, warn once. Collective: all ranks."""
        kind = "NaN" if math.isnan(bad.value) else "infinite"
        stages = self._staged.num_stages
        where = f"the loss of micro-batch {bad.microbatch} is {kind} (stage {stages - 1} of {stages}, rank {bad.rank})"
        if step.training:
            first = self._diagnose(program, step, bad)
            raise NonFiniteLossError(
                f"{where}. The first inf or NaN: {first}. Check the inputs and the "
                "learning rate; in fp16, activations overflow beyond 65504: bf16 has the range of fp32."
            )
        if not self._has_warned:
            self._has_warned = True
            get_dist_logger().warning(
                f"in evaluation, {where}. Such losses are returned unchanged.",
                ranks=[0],
            )


def check_optimizer_calls(calls: Sequence[OptimizerCalls]) -> None:
    """Refuse to go on after the script called the optimizer on some ranks only, by rank.

    Raises:
        UnlikeCallsError: it did.
    """
    ranks_of_calls: dict[OptimizerCalls, list[int]] = {}
    for rank, one in enumerate(calls):
        ranks_of_calls.setdefault(one._replace(digest=-1.0), []).append(rank)
    if len(ranks_of_calls) == 1:
        return
    clauses = [
        f"on {name_ranks(ranks)} the optimizer has taken {_count(one.applied_steps, 'step')} and adds up the gradients "
        f"of {_count(one.num_passes, 'call')}"
        for one, ranks in ranks_of_calls.items()
    ]
    raise UnlikeCallsError(
        f"all ranks must make the same calls in the same order: {', '.join(clauses)}. Call optimizer.step() and "
        "optimizer.zero_grad() on all ranks. Their weights no longer fit together: load a checkpoint on all ranks."
    )


def check_before_save(optimizer: HybridOptimizer, save: str) -> None:
    """Refuse to save weights that ranks have updated in other ways. Collective: all ranks, one exchange.

    Args:
        optimizer: that updates them.
        save: the method that saves.

    Raises:
        UnlikeCallsError: the script has called the optimizer on some ranks only, or with other arguments; on all ranks.
        UnequalRanksError: ranks have other settings of the optimizer; on all ranks.
    """
    own = OptimizerCalls(optimizer.num_pending, optimizer.applied_steps, optimizer.calls.digest)
    digest = 0.0
    if settings := optimizer.group_settings:
        read = settings.on_device()
        digest = settings.digest(torch.cat(read).tolist() if read else (), with_modes=False)
    rows = gather_numbers(optimizer.norm.control, f"in {save}", [*own, digest])
    calls = [OptimizerCalls(*numbers) for *numbers, _ in rows]
    check_optimizer_calls(calls)
    optimizer.calls.check([one.digest for one in calls], f"in {save}, after other calls of the optimizer", taken=False)
    if settings is not None:
        after = f"in {save}, after other settings of the optimizer"
        settings.check([last for *_, last in rows], after, _NOT_SAVED)


def _count(number: float, noun: str) -> str:
    return f"{number:.0f} {noun}{'' if number == 1 else 's'}"
