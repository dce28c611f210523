"""The message of each rank at the end of a step, a few numbers, and what all of them come to."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hybridpp.pipeline import LossReduction, SplitBatch, StepResult
from hybridpp_plugins.manual_clipping import ManualScaling


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
    """

    num_passes: float = 0.0
    applied_steps: float = 0.0


class RankReport(NamedTuple):
    """What a rank reports of a step besides its losses.

    Attributes:
        failed: 1 if this rank refuses the step.
        reduction: of the criterion.
        scaled: how the script scaled gradients.
        calls: of the optimizer.
        digest: of what ranks still compare of their batches; -1: nothing.
        wrote_buffer: 1 if a forward pass has written here to a buffer that was not written to before.
        save: how far a save in the background is, see :class:`~hybridpp_plugins.background_save.SaveOutcome`.
    """

    failed: float = 0.0
    reduction: float = float(LossReduction.MEAN)
    scaled: ManualScaling = ManualScaling()
    calls: OptimizerCalls = OptimizerCalls()
    digest: float = -1.0
    wrote_buffer: float = 0.0
    save: float = 0.0

    def numbers(self) -> list[float]:
        """All of it as numbers."""
        return [self.failed, self.reduction, *self.scaled, *self.calls, self.digest, self.wrote_buffer, self.save]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "RankReport":
        """The report, from its numbers."""
        failed, reduction, factor, norm, num_passes, applied_steps, *rest = numbers
        return cls(failed, reduction, ManualScaling(factor, norm), OptimizerCalls(num_passes, applied_steps), *rest)


class RankLoss(NamedTuple):
    """What a rank reports of its losses; zeros if it computes none.

    Attributes:
        loss: of the batch.
        bad_loss: the first loss of a micro-batch that is inf or NaN.
        bad_microbatch: index of that micro-batch; -1: there is none.
    """

    loss: float
    bad_loss: float
    bad_microbatch: float


class StepSummary(NamedTuple):
    """What every rank knows at the end of a step.

    Attributes:
        loss: of this replica's batch.
        bad_loss: the first one over all replicas; None: all are finite.
        reduction: of the criterion; the most severe finding of any rank.
        unequal: different losses of tensor-parallel ranks, by rank; empty: they are equal.
        reports: by rank.
    """

    loss: float
    bad_loss: BadLoss | None
    reduction: LossReduction
    unequal: Mapping[int, float]
    reports: Sequence[RankReport]

    @property
    def is_clean(self) -> bool:
        """Whether no rank reports a problem; digests are not looked at."""
        first = self.reports[0].calls
        return (
            self.bad_loss is None
            and not self.unequal
            and self.reduction is LossReduction.MEAN
            and not any(one.failed or one.scaled.factor > 0 or one.calls != first for one in self.reports)
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


def message_of(batch: SplitBatch, result: StepResult, losses: Sequence[float], report: RankReport) -> list[float]:
    """This rank's message, :data:`NUM_WITHOUT_NORM` numbers; ``losses`` are the result's, in host memory."""
    return [*report.numbers(), *_rank_loss(batch, result, losses)]


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
        bad_loss=next(bad_losses, None),
        reduction=LossReduction(int(max(reports[rank].reduction for rank in losses))),
        unequal=_unequal({rank: one.loss for rank, one in losses.items()}, last_stages),
        reports=reports,
    )


def _unequal(losses_at: Mapping[int, float], last_stages: Sequence[Sequence[int]]) -> dict[int, float]:
    """The losses of the first replica whose tensor-parallel ranks have different ones, by rank; empty: none."""
    for ranks in last_stages:
        # Compared as text, so that NaN equals NaN.
        if len({repr(losses_at[rank]) for rank in ranks}) > 1:
            return {rank: losses_at[rank] for rank in ranks}
    return {}
