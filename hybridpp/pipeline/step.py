"""What the executor is given for one batch, and what it gives back."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridpp.pipeline.batch import Microbatch

Criterion = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One batch to run.

    Attributes:
        microbatches: the batch's parts, the same on every rank of the pipeline.
        loss_weights: factor on each micro-batch's loss in the gradient, loss scale included.
        keys: each micro-batch's key for random numbers.
        criterion: ``criterion(outputs, inputs)`` gives a scalar; None where no loss is asked for.
        training: whether to run backward.
        keep_outputs: whether the last stage keeps the model's outputs.
        last_backward: called before the rank's last action that adds to gradients, with the parameters that get
            something in it; None: all may. Returns whether it matters when each gradient is complete.
        reduce_gradients: called after it.
        max_stored_microbatches: how many micro-batches' activations the rank keeps whole, one for each of its stages
            counted as one; those beyond may be recomputed.
    """

    microbatches: Sequence[Microbatch]
    loss_weights: Sequence[float]
    keys: Sequence[int]
    criterion: Criterion | None
    training: bool
    keep_outputs: bool
    last_backward: Callable[[Collection[str] | None], bool]
    reduce_gradients: Callable[[], None]
    max_stored_microbatches: int = 0


class StepResult:
    """What a step gave on this rank; empty except where the last stage is.

    Args:
        num_microbatches: of the step.
        device: where the losses are.

    Attributes:
        losses: detached fp32 scalars, ``[num_microbatches]``. They share one piece of memory: a small one per
            micro-batch, kept for the whole step, would tear the allocator's large ones apart.
        has_loss: for which micro-batches there is one; not for one that holds no items.
        outputs: what the model returned, detached, by micro-batch.
    """

    def __init__(self, num_microbatches: int, device: torch.device):
        self.losses = torch.zeros(num_microbatches, device=device)
        self.has_loss = [False] * num_microbatches
        self.outputs: dict[int, Any] = {}

    def keep_loss(self, microbatch: int, loss: Tensor) -> None:
        """Copy a loss."""
        self.losses[microbatch] = loss.detach()
        self.has_loss[microbatch] = True
