"""What the loss of a batch of one micro-batch is a mean over, for what is reported: no weight depends on it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybridpp.config import PipelineConfig
from hybridpp.nn.torch_private import pytree
from hybridpp.pipeline import (
    CriterionAdapter,
    LossForm,
    LossTrace,
    NotCountedError,
    SplitBatch,
    loss_form_of,
)
from hybridpp.pipeline.loss_items import without_floor
from hybridpp.pipeline.loss_reduction import duplicate_inputs


class CountedLoss:
    """The first loss of a criterion with one micro-batch, in training or in evaluation.

    Nothing is refused, and nothing communicated: the micro-batch is the batch.

    Args:
        criterion: of the step.
        batch: of this replica.
        pipeline: how batches are split.
        weights: of the micro-batch in the gradient.

    Attributes:
        weights: as given.
        shares: of the micro-batch in this replica's loss.
    """

    def __init__(
        self, criterion: CriterionAdapter, batch: SplitBatch, pipeline: PipelineConfig, weights: Sequence[float]
    ):
        self._criterion, self._batch, self._pipeline = criterion, batch, pipeline
        self._trace: LossTrace | None = None
        self._form: LossForm | None = None
        self.weights = weights
        self.shares = [one.share for one in batch.microbatches]

    @contextmanager
    def watched(self, microbatch: int, inputs: Any, received: Sequence[Tensor]) -> Iterator[None]:
        """A context for the last stage's forward and its loss."""
        (given,) = self._batch.microbatches
        self._trace = LossTrace([given.inputs, inputs], given.num_samples, self._pipeline.batch_dims or 0)
        self._trace.received(received)
        try:
            with self._trace:
                yield
        finally:
            self._trace = None

    def __call__(self, outputs: Any, inputs: Any) -> Any:
        """The criterion."""
        if self._trace is not None:
            self._trace.in_criterion = True
            self._trace.received([leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)])
        return self._criterion(outputs, inputs)

    def inspect(self, microbatch: int, loss: Tensor, outputs: Any, inputs: Any) -> tuple[Tensor | None, Tensor | None]:
        """The loss as it is; what it is a mean over is noted."""
        if self._trace is not None:
            with self._trace.paused():
                self._form = self._find(self._trace, loss)
            self._criterion.found_to_report(torch.is_grad_enabled(), self._batch.has_total, self._form)
        return loss, None

    def _find(self, trace: LossTrace, loss: Tensor) -> LossForm:
        terms = trace.terms(loss)
        # A loop over the values that are there may make other terms of each batch.
        if terms is None or trace.loops_over_values or self._batch.has_total:
            return LossForm.of_rows()
        (part,) = self._batch.microbatches

        def twice(inputs: Any, num_samples: int) -> Any:
            return duplicate_inputs(inputs, num_samples, self._pipeline.batch_dims or 0)

        try:
            return loss_form_of(terms, [part.inputs], twice, [part.num_samples], trace.rows)
        except NotCountedError:
            return LossForm.of_rows()

    def settle(self) -> None:
        """After an error there is nothing to exchange."""

    def weighted(self, batch: SplitBatch) -> SplitBatch:
        """The batch, with its number of items."""
        return batch if self._form is None else counted(batch, self._form)


def counted(batch: SplitBatch, form: LossForm) -> SplitBatch:
    """A batch of one micro-batch, with the number of items of its loss. No device is waited for."""
    (part,) = batch.microbatches
    try:
        values = [_value(without_floor(count).of(part.inputs, part.num_samples)) for count in form.counts]
    except Exception:  # any operation of the script's, on inputs of another form: what is reported counts samples
        values = [float(part.num_samples)] * len(form.counts)
    return replace(batch, counted_items=form.num_items(values))


def _value(value: Any) -> float | Tensor:
    if not isinstance(value, Tensor):
        return float(value)
    return float(value) if value.is_cpu else value.detach().double().reshape(())
