"""Which part of a whole parameter a rank holds, and back."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from hybridpp.cluster import Axis

_ATTRIBUTE = "hybridpp_placement"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How a parameter of the whole model lies on the ranks of an axis.

    Attributes:
        name: of the parameter.
        full_shape: of the whole parameter.
        dim: along which it is divided.
        size: over how many ranks.
        parts: widths along ``dim`` of what is divided one by one (queries, keys, values); their sum is the whole.
        copies: how many neighbouring ranks hold the same; 1 where every rank has its own part.
        axis: of the grid of ranks.

    A part whose width no equal shares fit is filled up with zeros, which :meth:`join` leaves out again.

    Example:
        >>> queries_and_keys = Placement(name="qk", full_shape=(8,), dim=0, size=2, parts=(4, 4))
        >>> queries_and_keys.take(torch.arange(8), rank=1)
        tensor([2, 3, 6, 7])
    """

    name: str
    full_shape: tuple[int, ...]
    dim: int
    size: int
    parts: tuple[int, ...]
    copies: int = 1
    axis: Axis = "tp"

    @property
    def num_shares(self) -> int:
        """How many different shares there are."""
        return self.size // self.copies

    @property
    def widths(self) -> tuple[int, ...]:
        """What a rank has of each part, filled up."""
        return tuple(-(-part // self.num_shares) for part in self.parts)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of what a rank holds."""
        return (*self.full_shape[: self.dim], sum(self.widths), *self.full_shape[self.dim + 1 :])

    def counts_on(self, rank: int) -> bool:
        """Whether the member ``rank`` of the axis is the first of those that hold the same."""
        return rank % self.copies == 0

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """What the member ``rank`` of the axis holds of a tensor of ``full_shape``; memory of its own, contiguous."""
        share = rank // self.copies
        pieces = []
        for part, width in zip(torch.split(whole, list(self.parts), self.dim), self.widths, strict=True):
            start = min(share * width, part.shape[self.dim])
            piece = part.narrow(self.dim, start, min(width, part.shape[self.dim] - start))
            pieces.append(piece)
            if piece.shape[self.dim] < width:
                shape = [*piece.shape]
                shape[self.dim] = width - piece.shape[self.dim]
                pieces.append(piece.new_zeros(shape))
        return torch.cat(pieces, self.dim)

    def join(self, locals_: Sequence[Tensor]) -> Tensor:
        """The whole tensor, from what every member of the axis holds, in order."""
        shares = locals_[:: self.copies]
        ends = list(accumulate(self.widths))
        pieces = []
        for part, end, width in zip(self.parts, ends, self.widths, strict=True):
            joined = torch.cat([share.narrow(self.dim, end - width, width) for share in shares], self.dim)
            pieces.append(joined.narrow(self.dim, 0, part))
        return torch.cat(pieces, self.dim)


def placement_of(parameter: Tensor) -> Placement | None:
    """How the parameter lies on the ranks; None where every rank has all of it."""
    found: Any = vars(parameter).get(_ATTRIBUTE)
    return found if isinstance(found, Placement) else None


@torch.no_grad()
def divide(parameter: nn.Parameter, placement: Placement, rank: int) -> None:
    """Let a parameter hold a rank's share only; it stays the same object."""
    parameter.data = placement.take(parameter.data, rank)
    vars(parameter)[_ATTRIBUTE] = placement
