"""Mixed precision: dtypes, the loss scale, fp32 master weights, and the search for the first inf or NaN."""

from hybridpp.precision.dtypes import (
    cast_model,
    describe_dtypes,
    dtype_changes,
    refuse_conversions,
    torch_dtype,
    working_dtype,
)
from hybridpp.precision.function_casts import FunctionCasts
from hybridpp.precision.mixed_precision import (
    LossScale,
    LossScaler,
    MasterWeights,
    PartOf,
    ReplicatedTarget,
    update_loss_scale,
)
from hybridpp.precision.module_dtypes import (
    ModuleDtypes,
    dtype_boundaries,
    find_module_dtypes,
    wrap_dtype_boundaries,
)
from hybridpp.precision.nonfinite import Finding, NonFiniteDetector, StepPosition
from hybridpp.precision.norm_modules import fp32_norms, norm_modules
from hybridpp.precision.sharded_target import ShardedTarget

__all__ = [
    "Finding",
    "FunctionCasts",
    "LossScale",
    "LossScaler",
    "MasterWeights",
    "ModuleDtypes",
    "NonFiniteDetector",
    "PartOf",
    "ReplicatedTarget",
    "ShardedTarget",
    "StepPosition",
    "cast_model",
    "describe_dtypes",
    "dtype_boundaries",
    "dtype_changes",
    "find_module_dtypes",
    "fp32_norms",
    "norm_modules",
    "refuse_conversions",
    "torch_dtype",
    "update_loss_scale",
    "working_dtype",
    "wrap_dtype_boundaries",
]
