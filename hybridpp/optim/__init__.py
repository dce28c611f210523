"""Optimizers, learning-rate schedules and the gradient norm."""

from hybridpp.optim.fused import can_divide, divided_in_kernel, fuse_by_default
from hybridpp.optim.gradient_norm import GlobalGradNorm, gradient_norms, total_norm
from hybridpp.optim.hybrid_adam import HybridAdam
from hybridpp.optim.joined import JoinedOptimizer, optimizer_name, single_optimizers
from hybridpp.optim.locality import (
    FLAT,
    Cut,
    Locality,
    LocalityUnknown,
    OperationsWatch,
    attributes_of,
    compiles_update,
    find_localities,
)
from hybridpp.optim.lr_schedulers import (
    ConstantWarmupLR,
    CosineAnnealingWarmupLR,
    ExponentialWarmupLR,
    FlatAnnealingLR,
    FlatAnnealingWarmupLR,
    LinearWarmupLR,
    MultiStepWarmupLR,
    PolynomialLR,
    PolynomialWarmupLR,
)
from hybridpp.optim.torch_schedulers import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    StepLR,
)
from hybridpp.optim.update_memory import AdamKernels, adam_kernels, adam_update_bytes

__all__ = [
    "FLAT",
    "AdamKernels",
    "ConstantWarmupLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmupLR",
    "Cut",
    "ExponentialLR",
    "ExponentialWarmupLR",
    "FlatAnnealingLR",
    "FlatAnnealingWarmupLR",
    "GlobalGradNorm",
    "HybridAdam",
    "JoinedOptimizer",
    "LambdaLR",
    "LinearWarmupLR",
    "Locality",
    "LocalityUnknown",
    "MultiStepLR",
    "MultiStepWarmupLR",
    "MultiplicativeLR",
    "OneCycleLR",
    "OperationsWatch",
    "PolynomialLR",
    "PolynomialWarmupLR",
    "StepLR",
    "adam_kernels",
    "adam_update_bytes",
    "attributes_of",
    "can_divide",
    "compiles_update",
    "divided_in_kernel",
    "find_localities",
    "fuse_by_default",
    "gradient_norms",
    "optimizer_name",
    "single_optimizers",
    "total_norm",
]
