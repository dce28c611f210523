"""What the executor is given for one batch, and what it gives back."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

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
            something in it; None: all may.
        reduce_gradients: called after it.
        max_stored_microbatches: how many micro-batches' activations the rank keeps whole; those beyond may be
            recomputed.
    """

    microbatches: Sequence[Microbatch]
    loss_weights: Sequence[float]
    keys: Sequence[int]
    criterion: Criterion | None
    training: bool
    keep_outputs: bool
    last_backward: Callable[[Collection[str] | None], None]
    reduce_gradients: Callable[[], None]
    max_stored_microbatches: int = 0


@dataclass
class StepResult:
    """What a step gave on this rank; both empty except where the last stage is.

    Attributes:
        losses: detached fp32 scalars, by micro-batch; None for one that holds no items.
        outputs: what the model returned, detached, by micro-batch.
    """

    losses: dict[int, Tensor | None] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
