"""The end of a step: one exchange of the losses and, if the optimizer needs it, the gradient norm."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hybridpp.cluster import get_dist_logger
from hybridpp.errors import NonFiniteLossError
from hybridpp.partition import StagedModel
from hybridpp.pipeline import LossReduction, PipelineStep, RankProgram, SplitBatch, StepResult
from hybridpp_plugins.criterion_check import CriterionCheck
from hybridpp_plugins.layout import Layout
from hybridpp_plugins.manual_clipping import ManualScaling
from hybridpp_plugins.optimizer import HybridOptimizer
from hybridpp_plugins.tp_loss_check import TensorParallelLossCheck


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


class StepSummary(NamedTuple):
    """What every rank knows at the end of a step.

    Attributes:
        loss: of this replica's batch.
        bad_loss: the first one over all replicas; None: all are finite.
        reduction: of the criterion; the most severe finding of any rank.
        unequal: different losses of tensor-parallel ranks, by rank; empty: they are equal.
        scaled: how the script scaled gradients, by rank.
    """

    loss: float
    bad_loss: BadLoss | None
    reduction: LossReduction
    unequal: Mapping[int, float]
    scaled: Sequence[ManualScaling]


class _RankLosses(NamedTuple):
    """A rank's message about its losses; zeros if it computes none.

    Attributes:
        total: the batch's loss.
        bad: the first loss that is inf or NaN.
        place: index of the micro-batch with that loss; -1: there is none.
        reduction: of the criterion.
    """

    total: float
    bad: float
    place: float
    reduction: float


# How many numbers of a message precede the norms.
_NUM_FIRST = len(_RankLosses._fields) + len(ManualScaling._fields)
_NOT_SCALED = ManualScaling()


class StepEpilogue:
    """Ends every step of one boosted model.

    Every rank gets the losses of all ranks and, if the optimizer needs it, every rank's part of the gradient norm; the
    host waits for the device at most once. Problems (inf or NaN, a criterion that returns a sum, gradients clipped by
    the script) are handled on every rank in the same way; a clean step runs none of that code.

    Args:
        staged: the model.
        layout: the ranks.
        placement: the rank of every stage in its pipeline.
        optimizer: the boosted optimizer, if there is one.
        criterion_check: checks criteria on this rank.
        diagnose: finds the first inf or NaN of a step by running it again; collective.
    """

    def __init__(
        self,
        staged: StagedModel,
        layout: Layout,
        placement: tuple[int, ...],
        optimizer: HybridOptimizer | None,
        criterion_check: CriterionCheck,
        diagnose: Callable[[RankProgram, PipelineStep, BadLoss | None], str],
    ):
        self._staged = staged
        self._control = layout.control
        # By replica, the tensor-parallel ranks of the last stage, which compute the same losses.
        self._last_stages = [layout.ranks_at(replica, placement[-1]) for replica in range(layout.grid.dp_size)]
        self._own_last = self._last_stages[layout.here.dp][0]
        self._optimizer = optimizer
        self._criterion_check = criterion_check
        self._tp_loss_check = TensorParallelLossCheck()
        self._diagnose = diagnose
        self._has_warned = False

    def close(self, batch: SplitBatch, result: StepResult, program: RankProgram, task: PipelineStep) -> Tensor:
        """The loss of this replica's batch, a scalar in host memory; the optimizer gets the norm.

        Collective: all ranks; one small all-gather of host memory.

        Args:
            batch: of this rank.
            result: of the step on this rank.
            program: that ran the step.
            task: the step that was run.

        Raises:
            ConfigError: the criterion returns a sum, or the script clipped gradients by each rank's own norm.
            NonFiniteLossError: in training, a loss is inf or NaN.
            UnequalRanksError: tensor-parallel ranks computed different losses.
        """
        optimizer = self._optimizer if task.training else None
        early = optimizer if optimizer and optimizer.tells_norm_early else None
        detector = self._optimizer.accumulated.clip_detector if self._optimizer else None
        summary = self._exchange(batch, result, early, detector.report() if detector else _NOT_SCALED)
        if summary.reduction is not LossReduction.MEAN:
            self._criterion_check.raise_or_warn(summary.reduction, type(self._staged.model).__name__)
        if detector:
            detector.check(summary.scaled)
        if summary.bad_loss is not None:
            self._report_bad_loss(summary.bad_loss, program, task)
        if summary.unequal:
            self._tp_loss_check.check(summary.unequal)
        if early and early.wants_report:
            early.nonfinite_steps.found(self._diagnose(program, task, None))
            if detector:  # the diagnosis has restored the gradients, which is not a change by the script
                detector.record()
        return torch.tensor(summary.loss, dtype=torch.float32)

    def _exchange(
        self, batch: SplitBatch, result: StepResult, optimizer: HybridOptimizer | None, scaled: ManualScaling
    ) -> StepSummary:
        """Exchange the step's numbers over all ranks; ``optimizer`` gets the norm, ``scaled`` is of this rank."""
        parts = optimizer.norm_parts() if optimizer else torch.empty(0, dtype=torch.float64)
        losses = result.losses.double() if any(result.has_loss) else torch.empty(0, dtype=torch.float64)
        # Both in one copy: this is the step's only wait for the device.
        joined = _joined(losses, parts)
        numbers = joined.tolist() if joined.numel() else []
        told_here = _rank_losses(batch, result, numbers[: losses.numel()], self._criterion_check.reduction)
        mine = torch.tensor([*told_here, *scaled], dtype=torch.float64)
        if optimizer:
            mine = torch.cat([mine, optimizer.norm.message(numbers[losses.numel() :])])
        rows = self._control.all_gather(mine)
        if optimizer:
            optimizer.take_norms([row[_NUM_FIRST:] for row in rows])
        told = {rank: _losses_of_row(rows[rank]) for ranks in self._last_stages for rank in ranks}
        bad = (BadLoss(one.bad, int(one.place), rank) for rank, one in told.items() if one.place >= 0)
        gravest = LossReduction(int(max(one.reduction for one in told.values())))
        unequal = self._unequal({rank: one.total for rank, one in told.items()})
        return StepSummary(told[self._own_last].total, next(bad, None), gravest, unequal, [*map(_scaling_of_row, rows)])

    def _unequal(self, losses_at: Mapping[int, float]) -> dict[int, float]:
        """The losses of the first replica whose tensor-parallel ranks have different ones, by rank; empty: none."""
        for ranks in self._last_stages:
            # Compared as text, so that NaN equals NaN.
            if len({repr(losses_at[rank]) for rank in ranks}) > 1:
                return {rank: losses_at[rank] for rank in ranks}
        return {}

    def _report_bad_loss(self, bad: BadLoss, program: RankProgram, task: PipelineStep) -> None:
        """Raise in training; in evaluation, warn once. Collective: all ranks."""
        kind = "NaN" if math.isnan(bad.value) else "infinite"
        stages = self._staged.num_stages
        where = f"the loss of micro-batch {bad.microbatch} is {kind} (stage {stages - 1} of {stages}, rank {bad.rank})"
        if task.training:
            first = self._diagnose(program, task, bad)
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


def _losses_of_row(row: Tensor) -> _RankLosses:
    """The losses in a rank's message."""
    return _RankLosses(*row[: len(_RankLosses._fields)].tolist())


def _scaling_of_row(row: Tensor) -> ManualScaling:
    """The script's scaling of gradients in a rank's message."""
    return ManualScaling(*row[len(_RankLosses._fields) : _NUM_FIRST].tolist())


def _joined(losses: Tensor, parts: Tensor) -> Tensor:
    if not losses.numel() or not parts.numel():
        return losses if losses.numel() else parts
    return torch.cat([losses, parts])


def _rank_losses(batch: SplitBatch, result: StepResult, losses: list[float], reduction: LossReduction) -> _RankLosses:
    at = {place: value for place, value in enumerate(losses) if result.has_loss[place]}
    parts = [value * batch.microbatches[place].share for place, value in at.items()]
    for place, value in at.items():
        if not math.isfinite(value):
            # math.fsum raises for infinities of both signs.
            return _RankLosses(sum(parts), value, place, reduction)
    return _RankLosses(math.fsum(parts), 0.0, -1.0, reduction)
