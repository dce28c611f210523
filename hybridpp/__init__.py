"""Hybrid-parallel training for PyTorch.

Names are resolved at their first use, so that ``import hybridpp.schedule`` loads no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridpp_plugins import (
        GeminiPlugin,
        HybridParallelPlugin,
        LowLevelZeroPlugin,
        TorchDDPPlugin,
        TorchFSDPPlugin,
    )

    from hybridpp.booster import Booster
    from hybridpp.cluster import (
        DistCoordinator,
        disable_existing_loggers,
        get_dist_logger,
        launch,
        launch_from_openmpi,
        launch_from_slurm,
        launch_from_torch,
    )
    from hybridpp.config import PipelineGradientCheckpointConfig
    from hybridpp.optim import ConstantWarmupLR as ConstantWarmupLR
    from hybridpp.optim import CosineAnnealingLR as CosineAnnealingLR
    from hybridpp.optim import CosineAnnealingWarmupLR as CosineAnnealingWarmupLR
    from hybridpp.optim import ExponentialLR as ExponentialLR
    from hybridpp.optim import ExponentialWarmupLR as ExponentialWarmupLR
    from hybridpp.optim import FlatAnnealingLR as FlatAnnealingLR
    from hybridpp.optim import FlatAnnealingWarmupLR as FlatAnnealingWarmupLR
    from hybridpp.optim import HybridAdam
    from hybridpp.optim import LambdaLR as LambdaLR
    from hybridpp.optim import LinearWarmupLR as LinearWarmupLR
    from hybridpp.optim import MultiplicativeLR as MultiplicativeLR
    from hybridpp.optim import MultiStepLR as MultiStepLR
    from hybridpp.optim import MultiStepWarmupLR as MultiStepWarmupLR
    from hybridpp.optim import OneCycleLR as OneCycleLR
    from hybridpp.optim import PolynomialLR as PolynomialLR
    from hybridpp.optim import PolynomialWarmupLR as PolynomialWarmupLR
    from hybridpp.optim import StepLR as StepLR
    from hybridpp.plugin import Plugin

__version__ = "0.2.0"

__all__ = [
    "Booster",
    "DistCoordinator",
    "GeminiPlugin",
    "HybridAdam",
    "HybridParallelPlugin",
    "LowLevelZeroPlugin",
    "PipelineGradientCheckpointConfig",
    "Plugin",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
    "disable_existing_loggers",
    "get_dist_logger",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
]

# The module of every name: of the public ones, then of those that are public in hybridpp.optim and were so here.
_MODULE_OF = {
    "Booster": "hybridpp.booster",
    "DistCoordinator": "hybridpp.cluster",
    "GeminiPlugin": "hybridpp_plugins",
    "HybridAdam": "hybridpp.optim",
    "HybridParallelPlugin": "hybridpp_plugins",
    "LowLevelZeroPlugin": "hybridpp_plugins",
    "PipelineGradientCheckpointConfig": "hybridpp.config",
    "Plugin": "hybridpp.plugin",
    "TorchDDPPlugin": "hybridpp_plugins",
    "TorchFSDPPlugin": "hybridpp_plugins",
    "disable_existing_loggers": "hybridpp.cluster",
    "get_dist_logger": "hybridpp.cluster",
    "launch": "hybridpp.cluster",
    "launch_from_openmpi": "hybridpp.cluster",
    "launch_from_slurm": "hybridpp.cluster",
    "launch_from_torch": "hybridpp.cluster",
    "ConstantWarmupLR": "hybridpp.optim",
    "CosineAnnealingLR": "hybridpp.optim",
    "CosineAnnealingWarmupLR": "hybridpp.optim",
    "ExponentialLR": "hybridpp.optim",
    "ExponentialWarmupLR": "hybridpp.optim",
    "FlatAnnealingLR": "hybridpp.optim",
    "FlatAnnealingWarmupLR": "hybridpp.optim",
    "LambdaLR": "hybridpp.optim",
    "LinearWarmupLR": "hybridpp.optim",
    "MultiStepLR": "hybridpp.optim",
    "MultiStepWarmupLR": "hybridpp.optim",
    "MultiplicativeLR": "hybridpp.optim",
    "OneCycleLR": "hybridpp.optim",
    "PolynomialLR": "hybridpp.optim",
    "PolynomialWarmupLR": "hybridpp.optim",
    "StepLR": "hybridpp.optim",
}

# Type checkers read the imports above; with this function they would accept any name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'hybridpp' has no attribute {name!r}")
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
