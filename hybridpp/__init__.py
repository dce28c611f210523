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
    from hybridpp.optim import CosineAnnealingWarmupLR, HybridAdam, LinearWarmupLR

__version__ = "0.1.0"

_HOME = {
    "Booster": "hybridpp.booster",
    "CosineAnnealingWarmupLR": "hybridpp.optim",
    "DistCoordinator": "hybridpp.cluster",
    "HybridAdam": "hybridpp.optim",
    "HybridParallelPlugin": "hybridpp_plugins",
    "LinearWarmupLR": "hybridpp.optim",
    "PipelineGradientCheckpointConfig": "hybridpp.config",
    "disable_existing_loggers": "hybridpp.cluster",
    "get_dist_logger": "hybridpp.cluster",
    "launch": "hybridpp.cluster",
    "launch_from_torch": "hybridpp.cluster",
}

__all__ = [
    "Booster",
    "CosineAnnealingWarmupLR",
    "DistCoordinator",
    "HybridAdam",
    "HybridParallelPlugin",
    "LinearWarmupLR",
    "PipelineGradientCheckpointConfig",
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
