"""What a sharded parameter carries: how it is divided, its name and its full shape."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from hybridpp.cluster import Axis
from hybridpp.sharding_plan.sharding_spec import DimShard, Narrowable

_ATTRIBUTE = "hybridpp_sharding"


@dataclass(frozen=True, kw_only=True)
class ParameterSharding:
    """How a parameter of the full model is divided over the ranks of an axis.

    Attributes:
        name: of the parameter.
        full_shape: of the full parameter.
        shard: how one of its dimensions is divided.
        size: number of ranks.
        axis: of the grid of ranks.

    Example:
        >>> queries_and_keys = ParameterSharding(name="qk", full_shape=(8,), shard=DimShard(0, (4, 4)), size=2)
        >>> queries_and_keys.take(torch.arange(8), rank=1)
        tensor([2, 3, 6, 7])
    """

    name: str
    full_shape: tuple[int, ...]
    shard: DimShard
    size: int
    axis: Axis = "tp"

    @property
    def dim(self) -> int:
        """The divided dimension."""
        return self.shard.dim

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of a rank's shard."""
        local = sum(self.shard.local_widths(self.size))
        return (*self.full_shape[: self.dim], local, *self.full_shape[self.dim + 1 :])

    def replicated_views(self, local: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Views of those parts of a rank's tensor that neighbours hold, too, each after the number of holders."""
        end = 0
        copies = (number for _, number in self.shard.pieces())
        pieces = zip(copies, self.shard.local_widths(self.size), strict=True)
        for number, together in groupby(pieces, key=lambda piece: piece[0]):
            start, end = end, end + sum(width for _, width in together)
            if number > 1:
                yield number, local.narrow(self.dim, start, end - start)

    def counts_on(self, rank: int) -> bool:
        """Whether a rank holds anything that no rank before it holds."""
        return any(rank % copies == 0 for _, copies in self.shard.pieces())

    def counts_all_on(self, rank: int) -> bool:
        """Whether no rank before this one holds anything that it holds."""
        return all(rank % copies == 0 for _, copies in self.shard.pieces())

    def has_copies(self) -> bool:
        """Whether ranks hold the same part of the parameter."""
        return any(copies > 1 for _, copies in self.shard.pieces())

    def unique_mask(self, local: Tensor, rank: int) -> Tensor:
        """Which elements of a rank's tensor no rank before it holds: bool, in the tensor's shape and strides."""
        mask = torch.zeros_like(local, dtype=torch.bool)
        parts = torch.split(mask, list(self.shard.local_widths(self.size)), self.dim)
        for part, (_, copies) in zip(parts, self.shard.pieces(), strict=True):
            part.fill_(rank % copies == 0)
        return mask

    def take(self, full: Narrowable, rank: int, *, allow_view: bool = False) -> Tensor:
        """A rank's shard of a tensor of ``full_shape``: :meth:`DimShard.take`."""
        return self.shard.take(full, rank, self.size, allow_view=allow_view)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """The full tensor, from the shards of all ranks in order."""
        return self.shard.join(shards)


def sharding_of(parameter: Tensor) -> ParameterSharding | None:
    """How a parameter is divided; None: it is replicated."""
    found: Any = vars(parameter).get(_ATTRIBUTE)
    return found if isinstance(found, ParameterSharding) else None


@torch.no_grad()
def divide(parameter: nn.Parameter, sharding: ParameterSharding, rank: int, *, allow_view: bool = False) -> None:
    """Let a parameter hold a rank's shard; it stays the same object.

    Args:
        parameter: with its full values.
        sharding: how it is divided.
        rank: in the group.
        allow_view: let the shard be a view of the full values where it is one range.
    """
    parameter.data = sharding.take(parameter.data, rank, allow_view=allow_view)
    vars(parameter)[_ATTRIBUTE] = sharding
