"""Optimizers, learning-rate schedules and the gradient norm."""

from hybridpp.optim.gradient_norm import norms, total_norm
from hybridpp.optim.hybrid_adam import HybridAdam
from hybridpp.optim.lr_schedulers import CosineAnnealingWarmupLR, LinearWarmupLR

__all__ = ["CosineAnnealingWarmupLR", "HybridAdam", "LinearWarmupLR", "norms", "total_norm"]
