"""Settings as frozen dataclasses that validate themselves. Imports no torch, so bad settings are reported early."""

from hybridpp.config.base import require_bools, require_numbers, require_plain
from hybridpp.config.compile import CompileConfig
from hybridpp.config.parallel import ParallelConfig, PartitionConfig, cut_side
from hybridpp.config.pipeline import PipelineConfig, PipelineGradientCheckpointConfig
from hybridpp.config.precision import LossScaleConfig, OptimizerConfig, Precision, PrecisionConfig
from hybridpp.config.zero import ZeroConfig

__all__ = [
    "CompileConfig",
    "LossScaleConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PartitionConfig",
    "PipelineConfig",
    "PipelineGradientCheckpointConfig",
    "Precision",
    "PrecisionConfig",
    "ZeroConfig",
    "cut_side",
    "require_bools",
    "require_numbers",
    "require_plain",
]
