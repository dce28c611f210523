"""What replicas divide among themselves (ZeRO)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hybridpp.config.base import ConfigBase
from hybridpp.errors import ConfigError, shown


@dataclass(frozen=True, kw_only=True)
class ZeroConfig(ConfigBase):
    """What replicas divide among themselves, and when they exchange it.

    Attributes:
        zero_stage: 0: nothing; 1: optimizer state and masters; 2: also the sums of gradients; 3: also weights.
        zero_reduce: when gradients are summed over the replicas from stage 2 on: after the backward pass of each
            ``"microbatch"``, so that none are held complete, or once per ``"step"``, with the bits and the volume of
            stage 1; None: each micro-batch.
        offload_optimizer: share of the optimizer's state and masters that lies in host memory and is updated
            there, from 0 to 1; rounded up to whole buckets.
        max_gathered_stages: at stage 3 with several stages per rank, of how many the weights are gathered at a time, at
            least 2; None: of all up to 2 stages, else of half of them.
        zero_size: how many neighbouring replicas divide these things among themselves; the others have copies (hybrid
            sharding). ``"host"``: those of one host; None: all replicas; 1: nothing is divided.
    """

    zero_stage: int = 0
    zero_reduce: Literal["microbatch", "step"] | None = None
    offload_optimizer: float = 0.0
    max_gathered_stages: int | None = None
    zero_size: int | Literal["host"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.zero_stage not in (0, 1, 2, 3):
            raise ConfigError(f"zero_stage must be 0, 1, 2 or 3: got zero_stage={shown(self.zero_stage)}.")
        reduce: Any = self.zero_reduce
        if reduce not in (None, "microbatch", "step"):
            raise ConfigError(f"zero_reduce must be 'microbatch' or 'step': got zero_reduce={shown(reduce)}.")
        if reduce is not None and self.zero_stage < 2:
            raise ConfigError(
                f"zero_reduce={reduce!r} has no effect below stage 2, where every replica holds complete gradients: "
                f"got zero_stage={self.zero_stage}. Leave zero_reduce out, or use zero_stage=2."
            )
        if not 0 <= self.offload_optimizer <= 1:
            raise ConfigError(
                f"offload_optimizer must be from 0 to 1: got offload_optimizer={shown(self.offload_optimizer)}. Use "
                "1.0 to keep all of the optimizer's state in host memory."
            )
        self._check_gathered()
        self._check_size()

    def _check_gathered(self) -> None:
        number = self.max_gathered_stages
        if number is None:
            return
        if not isinstance(number, int) or isinstance(number, bool) or number < 2:
            raise ConfigError(
                "max_gathered_stages must be an integer of at least 2, as forward passes of one stage follow backward "
                f"passes of another: got max_gathered_stages={shown(number)}."
            )
        if self.zero_stage < 3:
            raise ConfigError(
                f"max_gathered_stages={number} has no effect below stage 3, where weights are not sharded: got "
                f"zero_stage={self.zero_stage}. Leave max_gathered_stages out, or use zero_stage=3."
            )

    def _check_size(self) -> None:
        size = self.zero_size
        if size is None:
            return
        if size != "host" and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ConfigError(
                f"zero_size must be an integer of at least 1, or 'host': got zero_size={shown(size)}. Leave it out "
                "for all replicas."
            )
        if self.zero_stage == 0:
            raise ConfigError(
                f"zero_size={size} has no effect at stage 0, where replicas divide nothing: got zero_stage=0. Leave "
                "zero_size out, or use zero_stage=1."
            )

    def within_host(self, num_ranks: int, ranks_per_replica: int) -> "ZeroConfig":
        """The same with the number of replicas of a host.

        Args:
            num_ranks: of a host.
            ranks_per_replica: of a replica.

        Raises:
            ConfigError: a host has not only complete replicas.
        """
        if num_ranks % ranks_per_replica:
            raise ConfigError(
                f"zero_size='host' needs hosts of complete replicas: got {num_ranks} ranks per host, and tp_size * "
                f"pp_size={ranks_per_replica} per replica. Leave zero_size out to divide over all replicas."
            )
        return replace(self, zero_size=num_ranks // ranks_per_replica)

    def among(self, num_replicas: int) -> "ZeroConfig":
        """What is left of this for a number of replicas: nothing is divided by one alone.

        Raises:
            ConfigError: sets of ``zero_size`` replicas do not cover them.
        """
        if isinstance(self.zero_size, int) and num_replicas % self.zero_size:
            sizes = [size for size in range(1, num_replicas + 1) if num_replicas % size == 0]
            raise ConfigError(
                f"zero_size must divide the number of replicas: got zero_size={self.zero_size} with {num_replicas} "
                f"replicas. Use {_listed(sizes)}, or leave it out for all."
            )
        if self.num_shards(num_replicas) == 1:
            return ZeroConfig(offload_optimizer=self.offload_optimizer)
        return replace(self, zero_size=self.num_shards(num_replicas))

    def num_shards(self, num_replicas: int) -> int:
        """Among how many of the replicas each thing is divided."""
        assert self.zero_size != "host", "within_host has been called"
        return (self.zero_size or num_replicas) if self.zero_stage else 1

    def num_gathered_stages(self, num_stages: int) -> int:
        """Of how many of a rank's stages the weights are gathered at a time."""
        number = num_stages if num_stages <= 2 else -(-num_stages // 2)
        return min(num_stages, self.max_gathered_stages or number)

    def weight_copies(self, num_replicas: int, num_stages: int) -> float:
        """How often a rank holds each of its weights at the peak of a step, without units that are gathered.

        Args:
            num_replicas: that divide weights among themselves.
            num_stages: of the model; those of a rank are counted as if all were gathered.
        """
        if self.zero_stage < 3 or num_replicas == 1:
            return 1.0
        return 1 / num_replicas + (1 if num_stages > 1 else 0)

    @property
    def reduces_each_microbatch(self) -> bool:
        """Whether gradients are reduced after the backward pass of each micro-batch."""
        return self.zero_stage >= 2 and self.zero_reduce != "step"


def _listed(numbers: Sequence[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last
