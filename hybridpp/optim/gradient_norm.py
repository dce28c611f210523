"""The global gradient norm, which does not depend on the parallel layout."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridpp.cluster import Group, gather_numbers
from hybridpp.nn.half import HALF_DTYPES
from hybridpp.nn.torch_private import foreach_copy_, foreach_norm

# Squares summed one by one in fp32, as torch does on CPUs, have a relative error of 1e-3 over 3e7 elements.
NORM_BLOCK = 2048
"""Squares are summed in blocks of this many elements, from a gradient's first one."""


def gradient_norms(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm of each gradient, in float64 on the gradients' device, without waiting for the device.

    Squares are summed in blocks in fp32 (in float64 for float64 gradients), and the blocks in float64. So the relative
    error does not grow with the size: it is below 1e-6 for random numbers, and below 1e-5 for many equal ones.
    """
    if not gradients:
        return torch.empty(0, dtype=torch.float64)
    gradients = [gradient.float() if gradient.dtype in HALF_DTYPES else gradient for gradient in gradients]
    large = [index for index, gradient in enumerate(gradients) if gradient.numel() > NORM_BLOCK]
    if not large:
        return torch.stack(foreach_norm(gradients)).double()
    cut = {index: _cut(gradients[index]) for index in large}
    # One call for small gradients and for the remainders that fill no block.
    rest = torch.stack(foreach_norm([cut[n][1] if n in cut else gradient for n, gradient in enumerate(gradients)]))
    norms = rest.double()
    by_block = torch.cat([part for index in large for part in (cut[index][0], rest[index : index + 1])]).double()
    totals = foreach_norm(torch.split(by_block, [len(cut[index][0]) + 1 for index in large]))
    totals_by_gradient = norms.unbind()
    foreach_copy_([totals_by_gradient[index] for index in large], totals)
    return norms


def _cut(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The norms of the full blocks, and the remainder."""
    if not gradient.is_contiguous():
        # In the order of the memory, as pieces of it are.
        gradient = gradient.permute(sorted(range(gradient.dim()), key=lambda dim: -gradient.stride()[dim]))
    flat = gradient.reshape(-1)
    num_full = flat.numel() // NORM_BLOCK
    full = num_full * NORM_BLOCK
    return torch.linalg.vector_norm(flat[:full].view(num_full, NORM_BLOCK), dim=1), flat[full:]


def total_norm(parts: Iterable[float]) -> float:
    """The 2-norm of all parts together, from the 2-norms of disjoint parts.

    The sum is rounded once, at the end, so it does not depend on the order: clipping multiplies by the same factor
    whichever rank holds which parameter.
    """
    squares = [part * part for part in parts]
    return _not_finite(squares) or math.sqrt(math.fsum(squares))


def _not_finite(values: Sequence[float]) -> float:
    """NaN or infinity, if that is among the values, or their sum overflows; else 0."""
    if all(map(math.isfinite, values)):
        # A sum that is rounded after each addition overflows where the exact one does, or close to it.
        return 0.0 if math.isfinite(sum(values)) else math.inf
    return math.nan if any(map(math.isnan, values)) else math.inf


def exact_terms(values: Sequence[float]) -> list[float]:
    """A few numbers with exactly the sum of many: two or three, unless the magnitudes of the values are far apart.

    Each is the sum of what the ones before it leave, rounded once. So ``math.fsum`` of the terms of several ranks is
    what it is of all their values.

    Args:
        values: finite.
    """
    terms: list[float] = []
    while rest := math.fsum([*values, *(-term for term in terms)]):
        terms.append(rest)
    return terms


@dataclass(frozen=True)
class GlobalGradNorm:
    """The gradient norm of the complete model, the same number on every rank and in every layout.

    Attributes:
        control: all ranks of the world.
        ranks: the ranks whose parts make up the norm: those of one replica, or all where replicas divide gradients.
        num_replicas: number of replicas of the model.
        counted: this rank's parameters that count here; a parameter that several ranks hold counts once.
        copied: the other parameters, and those that count only in part; they are only checked for inf and NaN.
        unique: for gradients that count only in part, by name, a mask of the elements that count.
        is_staged: whether other ranks have other parameters.
    """

    control: Group
    ranks: tuple[int, ...]
    num_replicas: int
    counted: tuple[str, ...]
    copied: tuple[str, ...]
    unique: Mapping[str, Tensor]
    is_staged: bool = False

    def parts(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The norms of this rank's gradients, on the device; those that count come first."""
        counted = [self._that_counts(name, gradients[name]) for name in self.counted]
        return gradient_norms([*counted, *(gradients[name] for name in self.copied)])

    def _that_counts(self, name: str, gradient: Tensor) -> Tensor:
        mask = self.unique.get(name)
        # Not a product: an inf that does not count times 0 is NaN.
        return gradient if mask is None else gradient.where(mask, gradient.new_zeros(()))

    def message(self, parts: Sequence[float]) -> list[float]:
        """What the other ranks need of this rank's :meth:`parts`: inf, NaN or 0, then terms of the sum of squares."""
        squares = [part * part for part in parts[: len(self.counted)]]
        bad = _not_finite([*squares, *parts[len(self.counted) :]])
        return [bad] if bad else [0.0, *exact_terms(squares)]

    def gather(self, call: str, gradients: Mapping[str, Tensor]) -> list[tuple[float, ...]]:
        """Every rank's message, by rank. Collective: all ranks, which are in ``call``."""
        return gather_numbers(self.control, call, self.message(self.parts(gradients).tolist()))

    def total(self, messages: Sequence[Sequence[float]]) -> float:
        """The norm, from every rank's message; inf or NaN where a gradient of any rank is."""
        terms = [term for rank in self.ranks for term in messages[rank][1:]]
        return _not_finite([*(message[0] for message in messages), *terms]) or math.sqrt(math.fsum(terms))

    def not_finite(self, gradients: Mapping[str, Tensor]) -> list[str]:
        """This rank's parameters whose gradients are inf or NaN. Waits for the device."""
        names = (*self.counted, *self.copied)
        parts = self.parts(gradients).tolist()
        return list(dict.fromkeys(name for name, part in zip(names, parts, strict=True) if not math.isfinite(part)))
