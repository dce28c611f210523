"""What every rank tells the others at the end of a step, as one row of numbers."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

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


class StepSummary(NamedTuple):
    """What every rank knows at the end of a step.

    Attributes:
        loss: of this replica's batch.
        bad_loss: the first one over all replicas; None: all are finite.
        reduction: of the criterion; the most severe finding of any rank.
        unequal: different losses of tensor-parallel ranks, by rank; empty: they are equal.
        scaled: how the script scaled gradients, by rank.
        failed: the ranks that refuse the step.
        digests: of what ranks still compare of their batches, by rank; None: nothing.
    """

    loss: float
    bad_loss: BadLoss | None
    reduction: LossReduction
    unequal: Mapping[int, float]
    scaled: Sequence[ManualScaling]
    failed: Sequence[int]
    digests: Sequence[float | None]


class RankReport(NamedTuple):
    """A rank's message about a step.

    Attributes:
        failed: 1 if this rank refuses the step.
        total: the batch's loss; 0 like the rest if the rank computes none.
        bad: the first loss that is inf or NaN.
        place: index of the micro-batch with that loss; -1: there is none.
        reduction: of the criterion.
        digest: of what ranks still compare of their batches; -1: nothing.
    """

    failed: float
    total: float
    bad: float
    place: float
    reduction: float
    digest: float = -1.0


NUM_FIRST = len(RankReport._fields) + len(ManualScaling._fields)
"""How many numbers of a row precede the norms."""


def row_of(
    batch: SplitBatch,
    result: StepResult,
    losses: list[float],
    reduction: LossReduction,
    scaled: ManualScaling,
    failed: bool,
    digest: float = -1.0,
) -> Tensor:
    """This rank's row, float64 of shape ``[NUM_FIRST]``; ``losses`` are the result's, in host memory."""
    report = _report(batch, result, losses, reduction, failed)._replace(digest=digest)
    return torch.tensor([*report, *scaled], dtype=torch.float64)


def _report(
    batch: SplitBatch, result: StepResult, losses: list[float], reduction: LossReduction, failed: bool
) -> RankReport:
    at = {place: value for place, value in enumerate(losses) if result.has_loss[place]}
    parts = [value * batch.microbatches[place].share for place, value in at.items()]
    for place, value in at.items():
        if not math.isfinite(value):
            # math.fsum raises for infinities of both signs.
            return RankReport(failed, sum(parts), value, place, reduction)
    return RankReport(failed, math.fsum(parts), 0.0, -1.0, reduction)


def summary_of(rows: Sequence[Tensor], last_stages: Sequence[Sequence[int]], own_last: int) -> StepSummary:
    """What the rows of all ranks say.

    Args:
        rows: by rank.
        last_stages: by replica, the tensor-parallel ranks of the last stage, which compute the same losses.
        own_last: the first of these in this rank's replica.
    """
    # One conversion for all: a tensor per number would take longer than the rest.
    numbers = [row[:NUM_FIRST].tolist() for row in rows]
    split = len(RankReport._fields)
    reports = [RankReport(*row[:split]) for row in numbers]
    told = {rank: reports[rank] for ranks in last_stages for rank in ranks}
    bad = (BadLoss(one.bad, int(one.place), rank) for rank, one in told.items() if one.place >= 0)
    return StepSummary(
        loss=told[own_last].total,
        bad_loss=next(bad, None),
        reduction=LossReduction(int(max(one.reduction for one in told.values()))),
        unequal=_unequal({rank: one.total for rank, one in told.items()}, last_stages),
        scaled=[ManualScaling(*row[split:]) for row in numbers],
        failed=[rank for rank, report in enumerate(reports) if report.failed],
        digests=[None if report.digest < 0 else report.digest for report in reports],
    )


def _unequal(losses_at: Mapping[int, float], last_stages: Sequence[Sequence[int]]) -> dict[int, float]:
    """The losses of the first replica whose tensor-parallel ranks have different ones, by rank; empty: none."""
    for ranks in last_stages:
        # Compared as text, so that NaN equals NaN.
        if len({repr(losses_at[rank]) for rank in ranks}) > 1:
            return {rank: losses_at[rank] for rank in ranks}
    return {}
