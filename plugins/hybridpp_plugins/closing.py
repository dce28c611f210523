"""At the end of a step, in one message: the losses, and the gradient norm where the optimizer will need it."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hybridpp.pipeline import SplitBatch, StepResult
from hybridpp_plugins.layout import Layout
from hybridpp_plugins.optimizer import HybridOptimizer


class BadLoss(NamedTuple):
    """A loss that is no number.

    Attributes:
        value: NaN or an infinity.
        microbatch: of which micro-batch of its replica.
        rank: where it was computed.
    """

    value: float
    microbatch: int
    rank: int


class Closing(NamedTuple):
    """What every rank knows at the end of a step.

    Attributes:
        loss: the mean over this replica's batch.
        bad_loss: the first one over all replicas; None: all are finite.
    """

    loss: float
    bad_loss: BadLoss | None


def close_step(
    layout: Layout, last_place: int, batch: SplitBatch, result: StepResult, optimizer: HybridOptimizer | None
) -> Closing:
    """Bring the step's numbers to every rank; the host waits for the device once, or not at all.

    Collective: all ranks; one small all-gather of host memory.

    Args:
        layout: the ranks.
        last_place: which rank of a pipeline holds the last stage.
        batch: this rank's.
        result: what the step gave here.
        optimizer: is told the gradient norm; None: not asked for.
    """
    parts = optimizer.norm_parts() if optimizer else torch.empty(0, dtype=torch.float64)
    losses = result.losses.double() if any(result.has_loss) else torch.empty(0, dtype=torch.float64)
    # Both at once: this is the step's one wait for the device.
    joined = _joined(losses, parts)
    numbers = joined.tolist() if joined.numel() else []
    mine = torch.tensor(_mean_loss(batch, result, numbers[: losses.numel()]), dtype=torch.float64)
    if optimizer:
        mine = torch.cat([mine, optimizer.norm.message(numbers[losses.numel() :])])
    rows = layout.control.all_gather(mine)
    if optimizer:
        optimizer.take_norms([row[2:] for row in rows])
    ends = [layout.rank_of(replica, last_place) for replica in range(layout.grid.dp_size)]
    losses_at = [_mean_loss_at(rows[rank]) for rank in ends]
    bad = (BadLoss(value, place, rank) for rank, (value, place) in zip(ends, losses_at, strict=True) if place >= 0)
    return Closing(losses_at[layout.here.dp][0], next(bad, None))


def _mean_loss_at(row: Tensor) -> tuple[float, int]:
    """What :func:`_mean_loss` gave on the rank whose message it is."""
    value, place = row[:2].tolist()
    return value, int(place)


def _joined(losses: Tensor, parts: Tensor) -> Tensor:
    if not losses.numel() or not parts.numel():
        return losses if losses.numel() else parts
    return torch.cat([losses, parts])


def _mean_loss(batch: SplitBatch, result: StepResult, losses: list[float]) -> tuple[float, float]:
    """The mean of the losses here and -1, or the first that is not finite and its micro-batch; 0 without losses."""
    at = {place: value for place, value in enumerate(losses) if result.has_loss[place]}
    for place, value in at.items():
        if not math.isfinite(value):
            return value, float(place)
    return math.fsum(value * batch.microbatches[place].share for place, value in at.items()), -1.0
