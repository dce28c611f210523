"""Which part of a whole parameter a rank holds, and back."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hybridpp.cluster import Axis

_ATTRIBUTE = "hybridpp_placement"


class Divisible(Protocol):
    """A whole tensor, in memory or in a file, of which ranges can be taken."""

    def narrow(self, dim: int, start: int, length: int, /) -> Tensor:
        """As ``torch.narrow``."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How a parameter of the whole model lies on the ranks of an axis.

    Attributes:
        name: of the parameter.
        full_shape: of the whole parameter.
        dim: along which it is divided.
        size: over how many ranks.
        parts: widths along ``dim`` of what is divided one by one (queries, keys, values); their sum is the whole.
        copies: of each part, how many neighbouring ranks hold the same; empty: every rank has its own of all parts.
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
    copies: tuple[int, ...] = ()
    axis: Axis = "tp"

    @property
    def widths(self) -> tuple[int, ...]:
        """What a rank has of each part, filled up."""
        return tuple(-(-part * copies // self.size) for part, copies in self._copied_parts)

    @property
    def _copied_parts(self) -> list[tuple[int, int]]:
        return list(zip(self.parts, self.copies or (1,) * len(self.parts), strict=True))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of what a rank holds."""
        return (*self.full_shape[: self.dim], sum(self.widths), *self.full_shape[self.dim + 1 :])

    def copied(self, local: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Views of what neighbours hold the same of, in a member's tensor, each behind how many they are."""
        end = 0
        pieces = zip((copies for _, copies in self._copied_parts), self.widths, strict=True)
        for copies, together in groupby(pieces, key=lambda piece: piece[0]):
            start, end = end, end + sum(width for _, width in together)
            if copies > 1:
                yield copies, local.narrow(self.dim, start, end - start)

    def counts_on(self, rank: int) -> bool:
        """Whether the member ``rank`` of the axis holds anything that none before it does."""
        return any(rank % copies == 0 for _, copies in self._copied_parts)

    def counts_all_on(self, rank: int) -> bool:
        """Whether none before the member ``rank`` of the axis holds anything that it holds."""
        return all(rank % copies == 0 for _, copies in self._copied_parts)

    def counted(self, local: Tensor, rank: int) -> Tensor:
        """What of a member's tensor none before it holds; flat, if that is not all of it."""
        if self.counts_all_on(rank):
            return local
        pieces = torch.split(local, list(self.widths), self.dim)
        own = [piece for piece, (_, copies) in zip(pieces, self._copied_parts, strict=True) if rank % copies == 0]
        return torch.cat([piece.reshape(-1) for piece in own])

    def take(self, whole: Divisible, rank: int) -> Tensor:
        """What the member ``rank`` of the axis holds of a tensor of ``full_shape``; memory of its own, contiguous.

        Nothing else of ``whole`` is looked at.
        """
        pieces = []
        for (part, copies), end, width in zip(self._copied_parts, accumulate(self.parts), self.widths, strict=True):
            start = min(rank // copies * width, part)
            piece = whole.narrow(self.dim, end - part + start, min(width, part - start))
            pieces.append(piece)
            if piece.shape[self.dim] < width:
                shape = [*piece.shape]
                shape[self.dim] = width - piece.shape[self.dim]
                pieces.append(piece.new_zeros(shape))
        return torch.cat(pieces, self.dim)

    def join(self, locals_: Sequence[Tensor]) -> Tensor:
        """The whole tensor, from what every member of the axis holds, in order."""
        ends = list(accumulate(self.widths))
        pieces = []
        for (part, copies), end, width in zip(self._copied_parts, ends, self.widths, strict=True):
            shares = [local.narrow(self.dim, end - width, width) for local in locals_[::copies]]
            pieces.append(torch.cat(shares, self.dim).narrow(self.dim, 0, part))
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
