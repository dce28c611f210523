"""The executor's input and result for one batch."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.autograd.graph import Node

from hybridpp.pipeline.batch import Microbatch

MicrobatchLoss = Callable[[Any, Any], Tensor]


class StageWeights(Protocol):
    """Weights that are gathered for the stages that use them."""

    @property
    def gather_as_others(self) -> Callable[..., None]:
        """``gather_as_others(backward=...)`` takes part in the gathers of a pass that only other replicas run."""

    def unshard(self, stage: int) -> None:
        """Start to gather the weights of a stage. Collective: all replicas."""

    def wait(self, stage: int) -> None:
        """Wait until they are there."""

    def reshard(self, stage: int) -> None:
        """Free them."""


@dataclass(frozen=True, kw_only=True)
class PipelineStep:
    """One batch to run.

    Attributes:
        microbatches: the batch's parts, the same on every rank of the pipeline.
        loss_weights: factor on each micro-batch's loss in the gradient, including the loss scale. The first loss of a
            criterion may change them, before the first backward pass.
        keys: each micro-batch's key for random numbers.
        criterion: ``criterion(outputs, inputs)`` returns a scalar; None: no loss is computed.
        training: whether to run backward.
        keep_outputs: whether the last stage keeps the model's outputs.
        begin_last_backward: called before a stage's last action that adds to gradients, with the stage and the names
            of the parameters that it may add to (None: all). Returns whether gradients should complete one by one.
        end_backward: called after each action that adds to gradients.
        reduce_gradients: called after the last of them, with the stage.
        weights: gathers the weights of stages; None: they are always there.
        max_stored_microbatches: number of micro-batches whose activations the rank stores completely, counted per
            stage; further ones may be recomputed.
        model_inputs: selects the part of a micro-batch's inputs that the model is called with.
        inspect_loss: called with each micro-batch's index, loss, model outputs and inputs; returns the loss that the
            backward pass begins from, None if it has no items, and what is reported of it, None for the same. None: not
            called.
        watched: a context for the last stage's forward of a micro-batch and its loss, of the micro-batch's index,
            inputs, and what was received of other stages.
        shares: of the micro-batches, where the first loss of a criterion may change them.
        is_coupled: whether all replicas compute the same loss, of all replicas' samples.
        settle: called where an error ended the step: takes part in what the first loss of a criterion exchanges between
            replicas, unless that is done.
        watched_forward: a context for a forward of the first micro-batch and its loss; None: not called.
        watched_stage: a context for a forward of any stage, without the criterion: of the stage, the micro-batch's
            index and inputs, what was received of other stages, and whether the stage is the last one; None: not
            called.
        checked: a context for a backward pass of the first micro-batch, of the nodes that it begins at; None: not
            called.
    """

    microbatches: Sequence[Microbatch]
    loss_weights: Sequence[float]
    keys: Sequence[int]
    criterion: MicrobatchLoss | None
    training: bool
    keep_outputs: bool
    begin_last_backward: Callable[[int, Collection[str] | None], bool]
    end_backward: Callable[[], None]
    reduce_gradients: Callable[[int], None]
    weights: StageWeights | None = None
    max_stored_microbatches: int = 0
    model_inputs: Callable[[Any], Any] = lambda inputs: inputs
    inspect_loss: Callable[[int, Tensor, Any, Any], tuple[Tensor | None, Tensor | None]] | None = None
    watched: Callable[[int, Any, Sequence[Tensor]], AbstractContextManager[None]] | None = None
    shares: Sequence[float] | None = None
    is_coupled: bool = False
    settle: Callable[[], None] = lambda: None
    watched_forward: Callable[[], AbstractContextManager[None]] | None = None
    watched_stage: Callable[[int, int, Any, Sequence[Tensor], bool], AbstractContextManager[None]] | None = None
    checked: Callable[[Sequence[Node]], AbstractContextManager[None]] | None = None


@dataclass(frozen=True)
class StepResult:
    """The result of a step on this rank; empty except on the rank of the last stage.

    Attributes:
        losses: detached float64 losses, shape ``[num_microbatches]``, in one tensor: a small tensor per micro-batch,
            kept to the end of the step, would fragment the allocator's memory.
        has_loss: whether each micro-batch has a loss; False for one without items.
        outputs: the model's detached outputs, by micro-batch.
    """

    losses: Tensor
    has_loss: list[bool]
    outputs: dict[int, Any]
