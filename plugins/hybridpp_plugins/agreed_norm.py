"""How the ranks put the global gradient norm together."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridpp.cluster import Group
from hybridpp.optim import norms, total_norm
from hybridpp.tensor_parallel import Placement


@dataclass(frozen=True)
class AgreedNorm:
    """The gradient norm of the whole model, the same number on every rank and in every layout.

    Attributes:
        control: all ranks of the world.
        ranks: those of one replica, whose parts make up the norm.
        counted: this rank's parameters that count here; one that several ranks hold counts once.
        copied: the others, and those of which only parts count: they only tell whether they are finite.
        width: the most parameters that any rank counts.
        places: how this rank's divided parameters lie on the ranks.
        tp_rank: this rank's place among those that share layers; what one before it holds too does not count here.
    """

    control: Group
    ranks: tuple[int, ...]
    counted: tuple[str, ...]
    copied: tuple[str, ...]
    width: int
    places: Mapping[str, Placement]
    tp_rank: int

    @property
    def num_replicas(self) -> int:
        """Of the model."""
        return self.control.size // len(self.ranks)

    def parts(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The norms of what this rank holds, still on the device: first of what counts."""
        counted = [self._own(name, gradients[name]) for name in self.counted]
        return norms([*counted, *(gradients[name] for name in self.copied)])

    def _own(self, name: str, gradient: Tensor) -> Tensor:
        return self.places[name].counted(gradient, self.tp_rank) if name in self.places else gradient

    def message(self, parts: list[float]) -> Tensor:
        """This rank's :meth:`parts`, for the other ranks: equally long everywhere, in host memory.

        Behind what counts is a zero, or what is not finite among the copies.
        """
        counted, copied = parts[: len(self.counted)], parts[len(self.counted) :]
        bad = next((part for part in copied if not math.isfinite(part)), 0.0)
        return torch.tensor(counted + [0.0] * (self.width - len(counted)) + [bad], dtype=torch.float64)

    def gather(self, gradients: Mapping[str, Tensor]) -> list[Tensor]:
        """Every rank's message, by rank. Collective: all ranks."""
        return self.control.all_gather(self.message(self.parts(gradients).tolist()))

    def total(self, rows: list[Tensor]) -> float:
        """The norm, from every rank's message; inf or NaN where a gradient of any rank is."""
        values = torch.stack(rows)
        if bool(torch.isfinite(values).all()):
            return total_norm(part for rank in self.ranks for part in rows[rank].tolist())
        return math.nan if bool(values.isnan().any()) else math.inf

    def not_finite(self, gradients: Mapping[str, Tensor]) -> list[str]:
        """This rank's parameters whose gradient is not finite. Waits for the device."""
        names = (*self.counted, *self.copied)
        parts = self.parts(gradients).tolist()
        return list(dict.fromkeys(name for name, part in zip(names, parts, strict=True) if not math.isfinite(part)))
