"""Find plugins by name, among the entry points of every installed package."""

import importlib
from importlib.metadata import entry_points
from typing import Any

from hybridpp.errors import ConfigError, shown

GROUP = "hybridpp.plugins"
# What pyproject.toml declares, for a checkout that is on PYTHONPATH and not installed.
_OWN = {
    "gemini": "hybridpp_plugins:GeminiPlugin",
    "hybrid_parallel": "hybridpp_plugins:HybridParallelPlugin",
    "low_level_zero": "hybridpp_plugins:LowLevelZeroPlugin",
    "torch_ddp": "hybridpp_plugins:TorchDDPPlugin",
    "torch_fsdp": "hybridpp_plugins:TorchFSDPPlugin",
}


def plugin_names() -> list[str]:
    """The names that :func:`load_plugin` takes."""
    return sorted({*_OWN, *(entry.name for entry in entry_points(group=GROUP))})


def load_plugin(name: str) -> Any:
    """What the entry point ``name`` refers to; its package is imported.

    Raises:
        ConfigError: there is none of that name.
    """
    for entry in entry_points(group=GROUP, name=name):
        return entry.load()
    if name in _OWN:
        module, _, attribute = _OWN[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    raise ConfigError(
        f"plugin is one of {', '.join(plugin_names())}: got {shown(name)}. Install the package that brings it."
    )
