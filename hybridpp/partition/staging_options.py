"""Options of a staged model."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from hybridpp.cluster import DrawMonitor
from hybridpp.config import PartitionConfig, PipelineGradientCheckpointConfig
from hybridpp.partition.common_traces import CommonTraces
from hybridpp.partition.memory import TrainingStateSpec
from hybridpp.partition.plan import BoundarySharding


@dataclass(frozen=True, kw_only=True)
class StagingOptions:
    """How a model is cut, and the context of its stages.

    Attributes:
        compute_dtype: floating-point inputs are cast to this; None: they are not cast.
        dtypes: of the model's tensors that will be cast, by ``id``.
        partition: where to cut.
        recomputation: which blocks are recomputed in the backward pass; None: none.
        broadcast: gives every rank of the pipeline the first rank's numbers (for ``balance="time"``).
        recomputed: names of these blocks, on the one stage of a model that is not cut; None: as ``recomputation`` says.
        recompute_context: the context in which activation checkpointing runs parts of the forward again.
        boundary_sharding: of the values between stages; None: they are sent unsharded.
        sequence_blocks: blocks that run on sequence shards, with the modules inside that must run within the block's
            forward.
        state_spec: what a rank keeps for each trainable weight.
        ranks: the rank of each stage; empty: one stage per rank.
        draws: of the model.
        common: traces of the in-process ranks that hold equal models; None: each rank traces for itself.
    """

    compute_dtype: torch.dtype | None = None
    dtypes: Mapping[int, torch.dtype] = field(default_factory=dict)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    recomputation: PipelineGradientCheckpointConfig | None = None
    recomputed: tuple[str, ...] | None = None
    broadcast: Callable[[list[float]], list[float]] = list
    recompute_context: Callable[[], AbstractContextManager[None]] = nullcontext
    boundary_sharding: BoundarySharding | None = None
    sequence_blocks: Mapping[str, Collection[str]] = field(default_factory=dict)
    state_spec: TrainingStateSpec = field(default_factory=TrainingStateSpec)
    ranks: Sequence[int] = ()
    draws: DrawMonitor = field(default_factory=DrawMonitor)
    common: CommonTraces | None = None
