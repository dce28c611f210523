"""Check once whether a criterion without a declared reduction returns a sum over samples."""

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hybridpp.cluster import get_dist_logger
from hybridpp.config import PipelineConfig
from hybridpp.errors import ConfigError
from hybridpp.pipeline import (
    CriterionAdapter,
    LossReduction,
    Microbatch,
    MicrobatchLoss,
    SumTracer,
    confirm_sum,
    detect_reduction,
    duplicate_samples,
    leaf_dims,
)


class CriterionCheck:
    """Checks the first loss of each criterion, in steps with several micro-batches.

    In training, the loss's autograd graph shows its reduction; in evaluation, without a graph, the criterion's calls
    do.

    Attributes:
        reduction: of the current step's criterion, if this rank computes losses.
        known: the identity of the last checked criterion, in evaluation and in training.
    """

    def __init__(self) -> None:
        self.reduction = LossReduction.MEAN
        self._pending: CriterionAdapter | None = None
        self._training = False
        self._pipeline: PipelineConfig | None = None
        self._microbatches: Sequence[Microbatch] = ()
        self._calls: SumTracer | None = None
        self.known: dict[bool, Any] = {}
        self._has_warned = False

    def begin(
        self, criterion: CriterionAdapter, training: bool, pipeline: PipelineConfig, microbatches: Sequence[Microbatch]
    ) -> MicrobatchLoss:
        """A step begins, whose losses matter together and whose criterion is not known; what to call for it."""
        self.reduction = LossReduction.MEAN
        self._pending, self._training, self._pipeline, self._microbatches = criterion, training, pipeline, microbatches
        return criterion if training else functools.partial(self._called, criterion)

    def _called(self, criterion: CriterionAdapter, outputs: Any, inputs: Any) -> Any:
        """The criterion in evaluation; its sums are noted at the first call."""
        if self._pending is None:
            return criterion(outputs, inputs)
        with SumTracer() as self._calls:
            return criterion(outputs, inputs)

    def inspect(self, microbatch: int, loss: Tensor, outputs: Any, inputs: Any) -> None:
        """Check the first loss."""
        criterion, pipeline = self._pending, self._pipeline
        if criterion is None or pipeline is None:
            return
        self._pending, self.known[self._training] = None, criterion.identity
        count = self._microbatches[microbatch].num_samples

        def on_twice() -> Any:
            in_dims = functools.partial(leaf_dims, dims=pipeline.batch_dims or 0)
            out_dims = functools.partial(leaf_dims, dims=pipeline.dims_of_outputs)
            return criterion(duplicate_samples(outputs, count, out_dims), duplicate_samples(inputs, count, in_dims))

        calls, self._calls = self._calls, None
        if self._training:
            self.reduction = detect_reduction(loss, outputs, on_twice)
        elif calls is not None and calls.is_sum(loss):
            self.reduction = confirm_sum(loss, on_twice)
        self._microbatches = ()

    def raise_or_warn(self, reduction: LossReduction, model: str) -> None:
        """Raise or warn about the finding of any rank, on every rank.

        Raises:
            ConfigError: the criterion adds up, so its mean over micro-batches would depend on their number.
        """
        self.reduction = LossReduction.MEAN
        if reduction is LossReduction.SUM:
            self.known.clear()  # it is checked again if the script goes on
            raise ConfigError(
                "the criterion returns a sum over samples without declaring it: for twice the samples it returned "
                "twice "
                "the loss, and the mean of such losses depends on num_microbatches. Pass loss_reduction='sum' "
                "to boost, or set criterion.reduction = 'sum' (functions have attributes, too), or return the mean."
            )
        if reduction is LossReduction.SUM_IN_MODEL and not self._has_warned:
            self._has_warned = True
            get_dist_logger().warning(
                f"the loss that {model} computes ends with a sum, and it is averaged over micro-batches and replicas. "
                "If it is a sum over samples, set criterion.reduction = 'sum'; otherwise set 'mean', which disables "
                "this warning.",
                ranks=[0],
            )
