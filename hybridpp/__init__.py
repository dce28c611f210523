"""Hybrid-parallel training for PyTorch.

Names are resolved at their first use, so that ``import hybridpp.schedule`` loads no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridpp_plugins import HybridParallelPlugin

    from hybridpp.booster import Booster
    from hybridpp.cluster import (
        DistCoordinator,
        disable_existing_loggers,
        get_dist_logger,
        launch,
        launch_from_torch,
    )
    from hybridpp.config import PipelineGradientCheckpointConfig
    from hybridpp.optim import (
        ConstantWarmupLR,
        CosineAnnealingLR,
        CosineAnnealingWarmupLR,
        ExponentialLR,
        ExponentialWarmupLR,
        FlatAnnealingLR,
        FlatAnnealingWarmupLR,
        HybridAdam,
        LambdaLR,
        LinearWarmupLR,
        MultiplicativeLR,
        MultiStepLR,
        MultiStepWarmupLR,
        OneCycleLR,
        PolynomialLR,
        PolynomialWarmupLR,
        StepLR,
    )

__version__ = "0.1.0"

_HOME = {
    "Booster": "hybridpp.booster",
    "ConstantWarmupLR": "hybridpp.optim",
    "CosineAnnealingLR": "hybridpp.optim",
    "CosineAnnealingWarmupLR": "hybridpp.optim",
    "DistCoordinator": "hybridpp.cluster",
    "ExponentialLR": "hybridpp.optim",
    "ExponentialWarmupLR": "hybridpp.optim",
    "FlatAnnealingLR": "hybridpp.optim",
    "FlatAnnealingWarmupLR": "hybridpp.optim",
    "HybridAdam": "hybridpp.optim",
    "HybridParallelPlugin": "hybridpp_plugins",
    "LambdaLR": "hybridpp.optim",
    "LinearWarmupLR": "hybridpp.optim",
    "MultiStepLR": "hybridpp.optim",
    "MultiStepWarmupLR": "hybridpp.optim",
    "MultiplicativeLR": "hybridpp.optim",
    "OneCycleLR": "hybridpp.optim",
    "PipelineGradientCheckpointConfig": "hybridpp.config",
    "PolynomialLR": "hybridpp.optim",
    "PolynomialWarmupLR": "hybridpp.optim",
    "StepLR": "hybridpp.optim",
    "disable_existing_loggers": "hybridpp.cluster",
    "get_dist_logger": "hybridpp.cluster",
    "launch": "hybridpp.cluster",
    "launch_from_torch": "hybridpp.cluster",
}

__all__ = [
    "Booster",
    "ConstantWarmupLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmupLR",
    "DistCoordinator",
    "ExponentialLR",
    "ExponentialWarmupLR",
    "FlatAnnealingLR",
    "FlatAnnealingWarmupLR",
    "HybridAdam",
    "HybridParallelPlugin",
    "LambdaLR",
    "LinearWarmupLR",
    "MultiStepLR",
    "MultiStepWarmupLR",
    "MultiplicativeLR",
    "OneCycleLR",
    "PipelineGradientCheckpointConfig",
    "PolynomialLR",
    "PolynomialWarmupLR",
    "StepLR",
    "disable_existing_loggers",
    "get_dist_logger",
    "launch",
    "launch_from_torch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hybridpp' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
