"""Optimizers, learning-rate schedules and the gradient norm."""

from hybridpp.optim.gradient_norm import norms, total_norm
from hybridpp.optim.hybrid_adam import HybridAdam
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

__all__ = [
    "ConstantWarmupLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmupLR",
    "ExponentialLR",
    "ExponentialWarmupLR",
    "FlatAnnealingLR",
    "FlatAnnealingWarmupLR",
    "HybridAdam",
    "LambdaLR",
    "LinearWarmupLR",
    "MultiStepLR",
    "MultiStepWarmupLR",
    "MultiplicativeLR",
    "OneCycleLR",
    "PolynomialLR",
    "PolynomialWarmupLR",
    "StepLR",
    "norms",
    "total_norm",
]
