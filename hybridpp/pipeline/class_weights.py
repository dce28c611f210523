"""What torch's classification losses average over."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class ClassWeights(NamedTuple):
    """The items that torch's classification losses average over; their number differs between micro-batches."""

    ignore_index: int
    weight: Tensor | None

    @classmethod
    def of(cls, criterion: Any) -> "ClassWeights | None":
        """Of a classification loss; None for any other criterion."""
        held: dict[str, Any] = {}
        while isinstance(criterion, functools.partial):
            held, criterion = {**criterion.keywords, **held}, criterion.func
        if criterion in (nn.functional.cross_entropy, nn.functional.nll_loss):
            return cls(held.get("ignore_index", -100), held.get("weight"))
        if isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss):
            return cls(criterion.ignore_index, criterion.weight)
        return None

    def num_items(self, target: Tensor) -> Tensor:
        """The weight of the targets that count."""
        if target.is_floating_point():  # class probabilities: every sample counts
            return torch.tensor(float(target.shape[0]))
        counts = target != self.ignore_index
        if self.weight is None:
            return counts.sum()
        return (self.weight.detach().to(target.device)[target.where(counts, 0)] * counts).sum()
