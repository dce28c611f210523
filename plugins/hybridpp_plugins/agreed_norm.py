"""How the ranks put the global gradient norm together."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridpp.cluster import Group
from hybridpp.optim import norms, total_norm


@dataclass(frozen=True)
class AgreedNorm:
    """The gradient norm of the whole model, the same number on every rank and in every layout.

    Attributes:
        control: all ranks of the world.
        ranks: those of one replica, whose parts make up the norm.
        counted: this rank's parameters that count here; one that several stages hold counts once.
        width: the most parameters that any rank counts.
    """

    control: Group
    ranks: tuple[int, ...]
    counted: tuple[str, ...]
    width: int

    @property
    def num_replicas(self) -> int:
        """Of the model."""
        return self.control.size // len(self.ranks)

    def parts(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The norms of what counts on this rank, still on the device."""
        return norms([gradients[name] for name in self.counted])

    def message(self, parts: list[float]) -> Tensor:
        """This rank's :meth:`parts`, for the other ranks: equally long everywhere, in host memory."""
        return torch.tensor(parts + [0.0] * (self.width - len(parts)), dtype=torch.float64)

    def gather(self, gradients: Mapping[str, Tensor]) -> list[Tensor]:
        """Every rank's message, by rank. Collective: all ranks."""
        return self.control.all_gather(self.message(self.parts(gradients).tolist()))

    def total(self, rows: list[Tensor]) -> float:
        """The norm, from every rank's message; inf or NaN where a gradient of any replica is."""
        values = torch.stack(rows)
        if bool(torch.isfinite(values).all()):
            return total_norm(part for rank in self.ranks for part in rows[rank].tolist())
        return math.nan if bool(values.isnan().any()) else math.inf

    def not_finite(self, rows: list[Tensor]) -> tuple[str, ...]:
        """The parameters counted here whose gradient is not finite."""
        mine = rows[self.control.rank].tolist()
        return tuple(name for name, part in zip(self.counted, mine, strict=False) if not math.isfinite(part))
