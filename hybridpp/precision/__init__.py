"""Number formats: the loss scale and the fp32 masters of half-precision weights."""

from hybridpp.precision.dtypes import cast, casts, dtype_of, working_dtype
from hybridpp.precision.loss_scale import LossScale, after_step
from hybridpp.precision.masters import MasterWeights

__all__ = ["LossScale", "MasterWeights", "after_step", "cast", "casts", "dtype_of", "working_dtype"]
