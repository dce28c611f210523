"""The global gradient norm, the same number in every layout."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def norms(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm of each gradient, as float64 where the gradients are: nothing waits for the device."""
    if not gradients:
        return torch.empty(0, dtype=torch.float64)
    return torch.stack(torch._foreach_norm(list(gradients))).double()


def total_norm(parts: Iterable[float]) -> float:
    """The 2-norm of everything, from the 2-norms of disjoint parts.

    The sum is exactly rounded, so it depends on no order: however parameters are shared out over ranks, clipping
    multiplies by the same factor.
    """
    squares = [part * part for part in parts]
    if not all(map(math.isfinite, squares)):
        return math.nan if any(map(math.isnan, squares)) else math.inf
    return math.sqrt(math.fsum(squares))
