"""Memory that the stages' parameters take on their ranks, and its limit."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from hybridpp.errors import PartitionError
from hybridpp.sizes import format_bytes

# Ratio to the mean above which a warning is logged.
_LOPSIDED = 3


class TrainingStateSpec(NamedTuple):
    """Training state that is kept for each trainable weight.

    Attributes:
        moments: optimizer states per weight, at least as wide as fp32; None: no optimizer and no gradients.
        masters: whether there is an fp32 master weight.
        num_shards: replicas that divide masters and optimizer states among themselves (ZeRO).
        num_gradient_shards: replicas that divide gradients among themselves.
        offload: share of masters and optimizer states that lies in host memory.
        weight_copies: how often the rank holds each of its weights, at the peak of a step: a part only, if replicas
            divide weights among themselves and gather them by unit; a part more than once, if by stage.
    """

    moments: int | None = None
    masters: bool = False
    num_shards: int = 1
    num_gradient_shards: int = 1
    offload: float = 0.0
    weight_copies: float = 1.0

    def bytes_of(self, parameter: nn.Parameter, dtype: torch.dtype, num_elements: int | None = None) -> int:
        """Bytes of the weight in ``dtype`` and, if it is trained, of its gradient, master weight and optimizer state.

        Args:
            parameter: the weight.
            dtype: the dtype in which the model computes with it.
            num_elements: number of its elements on the rank; None: all.
        """
        return self.parts_of(parameter, dtype, num_elements).total

    def parts_of(self, parameter: nn.Parameter, dtype: torch.dtype, num_elements: int | None = None) -> "StateBytes":
        """The summands of :meth:`bytes_of`."""
        count = parameter.numel() if num_elements is None else num_elements
        if not parameter.requires_grad:
            return StateBytes(math.ceil(count * self.weight_copies) * dtype.itemsize, 0, 0, 0)
        divided = math.ceil(count / self.num_shards * (1 - self.offload))
        wide = max(dtype.itemsize, torch.float32.itemsize)
        return StateBytes(
            weights=math.ceil(count * self.weight_copies) * dtype.itemsize,
            gradients=0 if self.moments is None else math.ceil(count / self.num_gradient_shards) * wide,
            masters=divided * torch.float32.itemsize if self.masters else 0,
            moments=divided * wide * (self.moments or 0),
        )

    def host_bytes_of(self, parameter: nn.Parameter, dtype: torch.dtype, num_elements: int | None = None) -> int:
        """Bytes in host memory, if it is trained: a master, optimizer states, and what passes to and from the device.

        Args:
            parameter, dtype, num_elements: as of :meth:`bytes_of`.
        """
        if not parameter.requires_grad or self.moments is None:
            return 0
        count = parameter.numel() if num_elements is None else num_elements
        wide = max(dtype.itemsize, torch.float32.itemsize)
        return math.ceil(count / self.num_shards * self.offload) * wide * (2 + self.moments)


class StateBytes(NamedTuple):
    """Bytes that a rank holds in training.

    Attributes:
        weights: in the dtypes in which the model computes.
        gradients: sums of them.
        masters: fp32 copies of weights.
        moments: the optimizer's states.
    """

    weights: int
    gradients: int
    masters: int
    moments: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """Memory that ranks need for parameters, and its limit.

    Attributes:
        sizes: bytes of each parameter on a rank that holds it, by name.
        ranks: the rank of each stage.
        limit: largest number of bytes for the parameters of a rank; None: no limit.
    """

    sizes: Mapping[str, int]
    ranks: Sequence[int]
    limit: int | None = None

    def by_rank(self, names: Sequence[set[str]]) -> dict[int, int]:
        """Bytes of each rank, given the parameters of each stage; parameters that two of its stages share count
        once."""
        held: dict[int, set[str]] = {}
        for rank, of_stage in zip(self.ranks, names, strict=True):
            held.setdefault(rank, set()).update(of_stage)
        return {rank: sum(self.sizes[name] for name in of_rank) for rank, of_rank in held.items()}

    def check(self, names: Sequence[set[str]], least: int | None = None) -> None:
        """Refuse stages that exceed the limit.

        Args:
            names: of what each stage holds.
            least: the smallest limit that some cut satisfies, if these stages are the best cut; None: the user
                requested the cut.

        Raises:
            PartitionError: a rank exceeds the limit.
        """
        held = self.by_rank(names)
        rank = max(held, key=lambda rank: held[rank], default=0)
        if self.limit is None or held.get(rank, 0) <= self.limit:
            return
        stages = [stage for stage, at in enumerate(self.ranks) if at == rank]
        which = f"stage{'s' if len(stages) > 1 else ''} {' and '.join(map(str, stages))} (rank {rank} of the pipeline)"
        limit_text = f"got memory_limit={format_bytes(self.limit)}"
        if least is None:
            raise PartitionError(
                f"the parameters of {which} take {format_bytes(held[rank])}, with gradients and optimizer "
                f"state: {limit_text}. "
                "Choose another cut, or remove layers_per_stage, split_points and annotations."
            )
        raise PartitionError(
            f"no cut within the memory limit was found: {limit_text}, and in the one that needs least, {which} needs "
            f"{format_bytes(least)} for parameters, gradients and optimizer state. Use memory_limit="
            f"'{format_bytes(least).replace(' ', '')}' or more, or raise pp_size or tp_size."
        )


def imbalance(names: Sequence[set[str]], numbers: Mapping[str, int]) -> tuple[int, float] | None:
    """The stage that holds most of the parameters, and the ratio to the mean, if that is above three.

    Args:
        names: of what each stage holds.
        numbers: elements of each parameter.
    """
    held = [sum(numbers[name] for name in of_stage) for of_stage in names]
    times = max(held) * len(held) / max(sum(held), 1)
    return (held.index(max(held)), times) if times > _LOPSIDED else None
