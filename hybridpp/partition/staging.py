"""What a staged model is told beside its stages and samples."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from hybridpp.config import PartitionConfig, PipelineGradientCheckpointConfig
from hybridpp.partition.plan import Parts


@dataclass(frozen=True, kw_only=True)
class Staging:
    """How a model is cut, and what its stages run in.

    Attributes:
        compute_dtype: floating-point inputs are cast to this; None leaves them alone.
        dtypes: of the model's tensors that will be cast, by ``id``.
        partition: where to cut.
        recomputation: which blocks are run again in the backward pass; None: none.
        agree: gives every rank of the pipeline the first one's numbers (for ``balance="time"``).
        again: what the model's forward runs in, for parts of it that activation checkpointing runs again.
        parts: what of the values between stages travels; None: all of it.
    """

    compute_dtype: torch.dtype | None = None
    dtypes: Mapping[int, torch.dtype] = field(default_factory=dict)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    recomputation: PipelineGradientCheckpointConfig | None = None
    agree: Callable[[list[float]], list[float]] = list
    again: Callable[[], AbstractContextManager[None]] = nullcontext
    parts: Parts | None = None
