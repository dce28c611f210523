"""Number formats: the loss scale, the fp32 masters of half-precision weights, and a search for inf and NaN."""

from hybridpp.precision.dtypes import cast, casts, describe, dtype_of, working_dtype
from hybridpp.precision.formats import Formats, keep_formats, module_formats
from hybridpp.precision.loss_scale import LossScale, after_step
from hybridpp.precision.losses import Fp32Losses
from hybridpp.precision.masters import MasterWeights
from hybridpp.precision.norms import norms
from hybridpp.precision.watch import Finding, Place, Watch

__all__ = [
    "Finding",
    "Formats",
    "Fp32Losses",
    "LossScale",
    "MasterWeights",
    "Place",
    "Watch",
    "after_step",
    "cast",
    "casts",
    "describe",
    "dtype_of",
    "keep_formats",
    "module_formats",
    "norms",
    "working_dtype",
]
