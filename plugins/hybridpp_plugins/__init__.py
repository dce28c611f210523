"""The plugins that come with hybridpp."""

from hybridpp_plugins.hybrid_parallel import HybridParallelPlugin
from hybridpp_plugins.presets import LowLevelZeroPlugin, TorchDDPPlugin

__all__ = ["HybridParallelPlugin", "LowLevelZeroPlugin", "TorchDDPPlugin"]
