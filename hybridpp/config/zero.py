"""What replicas divide among themselves (ZeRO)."""

from dataclasses import dataclass
from typing import Any, Literal

from hybridpp.config.base import ConfigBase
from hybridpp.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ZeroConfig(ConfigBase):
    """What replicas divide among themselves, and when they exchange it.

    Attributes:
        zero_stage: 0: nothing; 1: optimizer state and masters; 2: also the sums of gradients.
        zero_reduce: when gradients are summed over the replicas from stage 2 on: after the backward pass of each
            ``"microbatch"``, so that none are held complete, or once per ``"step"``, with the bits and the volume of
            stage 1; None: each micro-batch.
    """

    zero_stage: int = 0
    zero_reduce: Literal["microbatch", "step"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.zero_stage not in (0, 1, 2, 3):
            raise ConfigError(f"zero_stage must be 0, 1, 2 or 3: got zero_stage={self.zero_stage!r}.")
        if self.zero_stage > 2:
            raise ConfigError(
                f"weights are not sharded yet: got zero_stage={self.zero_stage}. Use zero_stage=2, which shards the "
                "gradients, the optimizer's state and the fp32 masters."
            )
        reduce: Any = self.zero_reduce
        if reduce not in (None, "microbatch", "step"):
            raise ConfigError(f"zero_reduce must be 'microbatch' or 'step': got zero_reduce={reduce!r}.")
        if reduce is not None and self.zero_stage < 2:
            raise ConfigError(
                f"zero_reduce={reduce!r} has no effect below stage 2, where every replica holds complete gradients: "
                f"got zero_stage={self.zero_stage}. Leave zero_reduce out, or use zero_stage=2."
            )

    @property
    def reduces_each_microbatch(self) -> bool:
        """Whether gradients are reduced after the backward pass of each micro-batch."""
        return self.zero_stage >= 2 and self.zero_reduce != "step"
