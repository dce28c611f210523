"""The plugins that come with hybridpp."""

from hybridpp_plugins.gemini import GeminiPlugin
from hybridpp_plugins.hybrid_parallel import HybridParallelPlugin
from hybridpp_plugins.low_level_zero import LowLevelZeroPlugin
from hybridpp_plugins.torch_ddp import TorchDDPPlugin
from hybridpp_plugins.torch_fsdp import TorchFSDPPlugin

__all__ = ["GeminiPlugin", "HybridParallelPlugin", "LowLevelZeroPlugin", "TorchDDPPlugin", "TorchFSDPPlugin"]
