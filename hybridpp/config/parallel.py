"""Parallel sizes, and where the model is cut."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from hybridpp.config.base import ConfigBase
from hybridpp.errors import ConfigError, shown, some_of
from hybridpp.sizes import parse_bytes


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(ConfigBase):
    """Parallel sizes of one replica of the model.

    Attributes:
        tp_size: tensor-parallel size: ranks that share each layer; 1: layers are not sharded.
        pp_size: pipeline-parallel size: ranks of each pipeline; 1: no pipeline.
        broadcast_buffers: whether replicas take the first one's persistent buffers where forward passes write to them.
        check_weights_every: number of training steps after which copies of weights on several ranks are compared; 0:
            never.
        tensor_parallel_plan: how layers are sharded over the tensor-parallel ranks, by patterns of module names:
            ``{"*.q_proj": "column", "*.o_proj": "row"}``; None: derived by running the model's blocks.
        enable_sequence_parallelism: whether activations between the sharded layers of a block (norms, dropout,
            residuals) are sharded along the sequence over the tensor-parallel ranks.
        sequence_parallelism_mode: ``"split_gather"``; None means the same.
    """

    tp_size: int = 1
    pp_size: int = 1
    broadcast_buffers: bool = True
    check_weights_every: int = 0
    tensor_parallel_plan: Mapping[str, str] | None = None
    enable_sequence_parallelism: bool = False
    sequence_parallelism_mode: Literal["split_gather"] | None = None

    def __post_init__(self) -> None:
        for name, value in (("tp_size", self.tp_size), ("pp_size", self.pp_size)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be an integer of at least 1: got {name}={shown(value)}.")
        super().__post_init__()
        if self.check_weights_every < 0:
            raise ConfigError(
                f"check_weights_every must be at least 0: got check_weights_every={self.check_weights_every}. Leave it "
                "out to compare no weights."
            )
        plan: Any = self.tensor_parallel_plan
        if plan is not None and not (isinstance(plan, Mapping) and all(isinstance(name, str) for name in plan)):
            raise ConfigError(
                "tensor_parallel_plan must be a dict from patterns of module names to styles, like "
                f"{{'*.q_proj': 'column', '*.o_proj': 'row'}}: got {shown(plan)}."
            )
        self._check_sequences()

    def _check_sequences(self) -> None:
        mode: str | None = self.sequence_parallelism_mode  # whatever a script gave
        if mode not in (None, "split_gather"):
            known = "not supported yet" if mode in ("ring", "all_to_all", "ring_attn") else "unknown"
            raise ConfigError(f"sequence_parallelism_mode={mode!r} is {known}. Use 'split_gather'.")
        if not self.enable_sequence_parallelism and mode is not None:
            raise ConfigError(
                f"sequence_parallelism_mode={mode!r} has no effect without enable_sequence_parallelism=True. Give "
                "both, or neither."
            )
        if self.enable_sequence_parallelism and self.tp_size == 1:
            raise ConfigError(
                "sequence parallelism shards sequences over the tensor-parallel ranks: got tp_size=1. "
                "Use tp_size=2 or more, or leave enable_sequence_parallelism out."
            )

    def dp_size(self, world_size: int) -> int:
        """Replicas of the model in a job of ``world_size`` ranks.

        Raises:
            ConfigError: ``world_size`` is not a multiple of ``tp_size * pp_size``.
        """
        ranks = self.tp_size * self.pp_size
        if world_size % ranks:
            fits = [n for n in (world_size // ranks * ranks, (world_size // ranks + 1) * ranks) if n]
            # One process: the script may have been started without a launcher.
            how = f" (torchrun --nproc-per-node {ranks} your_script.py)" if world_size == 1 else ""
            raise ConfigError(
                f"world size must be a multiple of tp_size * pp_size: got world_size={world_size}, "
                f"tp_size={self.tp_size}, pp_size={self.pp_size}. "
                f"Start {' or '.join(map(str, fits))} processes{how}, or change the sizes."
            )
        return world_size // ranks


def cut_side(side: Any) -> Any:
    """``"before"`` or ``"after"`` for a member of ``torch.distributed.pipelining.SplitPoint``; else the value."""
    named = {"BEGINNING": "before", "END": "after"}
    return named.get(side.name, side) if isinstance(side, Enum) else side


@dataclass(frozen=True, kw_only=True)
class PartitionConfig(ConfigBase):
    """Where the model is cut into stages.

    Attributes:
        layers_per_stage: number of blocks of each stage, in order.
        split_points: modules before or after which to cut, by name: ``{"encoder.layer.5": "after"}``; the sides may
            also be members of ``torch.distributed.pipelining.SplitPoint``.
        balance: what is balanced over the stages if neither of these is given: ``"flops"`` of the forward,
            ``"parameters"``, or ``"time"`` as measured by rank 0 at boost, for which the complete model must fit on its
            device.
        memory_limit: limit for the parameters of a rank over all of its stages, with gradients, fp32 master weights and
            optimizer state, without activations: bytes, or text like ``"16GiB"``; None: no limit.
    """

    layers_per_stage: Sequence[int] | None = None
    split_points: Mapping[str, Any] | None = None
    balance: Literal["flops", "parameters", "time"] = "flops"
    memory_limit: int | str | None = None

    @property
    def limit_bytes(self) -> int | None:
        """``memory_limit`` in bytes; None: no limit."""
        return None if self.memory_limit is None else parse_bytes("memory_limit", self.memory_limit)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.limit_bytes
        if self.split_points is not None and not isinstance(self.split_points, Mapping):
            raise ConfigError(
                f"split_points must be a dict from module names to 'before' or 'after': got {shown(self.split_points)}."
            )
        counts: Any = self.layers_per_stage
        if counts is not None and not (
            isinstance(counts, Sequence) and counts and all(isinstance(count, int) and count > 0 for count in counts)
        ):
            got = list(counts) if isinstance(counts, list | tuple) else counts
            raise ConfigError(f"layers_per_stage needs an integer of at least 1 for every stage: got {shown(got)}.")
        if self.layers_per_stage is not None and self.split_points is not None:
            raise ConfigError(
                "give layers_per_stage or split_points, not both: "
                f"got {some_of(self.layers_per_stage)} and {shown(dict(self.split_points))}."
            )
        if self.split_points is not None:
            sides = {name: cut_side(side) for name, side in self.split_points.items()}
            for name, side in sides.items():
                if side not in ("before", "after"):
                    raise ConfigError(
                        f"a side in split_points must be 'before' or 'after': got {shown(side)} for {shown(name)}."
                    )
            object.__setattr__(self, "split_points", sides)
        if self.balance not in ("flops", "parameters", "time"):
            raise ConfigError(f"balance must be one of flops, parameters, time: got {shown(self.balance)}.")
