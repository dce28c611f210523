"""Find plugins by name."""

import importlib
from importlib.metadata import entry_points
from typing import Any

from hybridpp.errors import ConfigError
from hybridpp.plugin import Plugin

GROUP = "hybridpp.plugins"
# What pyproject.toml declares, for a checkout that is on PYTHONPATH and not installed.
_OWN = {"hybrid_parallel": "hybridpp_plugins:HybridParallelPlugin"}


def plugin_names() -> list[str]:
    """The names that :func:`plugin_class` takes."""
    return sorted({*_OWN, *(entry.name for entry in entry_points(group=GROUP))})


def plugin_class(name: str) -> type[Plugin]:
    """The plugin called ``name``, from the entry points of every installed package.

    Raises:
        ConfigError: there is none of that name.
    """
    for entry in entry_points(group=GROUP, name=name):
        found: Any = entry.load()
        return _checked(name, found)
    if name in _OWN:
        module, _, attribute = _OWN[name].partition(":")
        return _checked(name, getattr(importlib.import_module(module), attribute))
    raise ConfigError(
        f"plugin is one of {', '.join(plugin_names())}: got {name!r}. Install the package that brings it."
    )


def _checked(name: str, found: Any) -> type[Plugin]:
    if not (isinstance(found, type) and issubclass(found, Plugin)):
        raise ConfigError(f"plugin {name!r} must be a subclass of hybridpp.plugin.Plugin: got {found!r}.")
    return found
