"""The plugins that come with hybridpp."""

from hybridpp_plugins.hybrid_parallel import HybridParallelPlugin

__all__ = ["HybridParallelPlugin"]
