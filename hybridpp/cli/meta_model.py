"""A Hugging Face model on the meta device, built from its configuration."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig

from hybridpp.errors import ConfigError

Config: TypeAlias = PreTrainedConfig | dict[str, Any]
"""Of a model of transformers, or of diffusers, which has a dict."""
Factory: TypeAlias = Callable[[Any], nn.Module]


def load_config(name: str) -> Config:
    """Read the configuration of a model, given a folder with a ``config.json`` or a name on the Hugging Face hub.

    Raises:
        ConfigError: there is none, or transformers cannot read it.
    """
    folder = Path(name)
    if (folder / "config.json").is_file() and (found := _of_diffusers(folder / "config.json")) is not None:
        return found
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ConfigError(f"{name} has no config.json. Pass a folder that save_pretrained wrote.")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except OSError as error:
        raise ConfigError(
            f"no model {name!r}: neither a folder nor a model on the Hugging Face hub has that name. Check the name "
            "and the connection."
        ) from error
    except Exception as error:  # of many types: unknown model types, inconsistent settings
        raise ConfigError(f"transformers cannot read the configuration of {name!r}: {_first_line(error)}") from error
    return config


def _of_diffusers(path: Path) -> dict[str, Any] | None:
    """The configuration in a file, if it names a class of diffusers."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # transformers says what is wrong
    return found if isinstance(found, dict) and isinstance(found.get("_class_name"), str) else None


def build(config: Config, task: str | None = None) -> nn.Module:
    """The model on the meta device, in evaluation mode.

    Args:
        config: configuration of the model.
        task: suffix of one of transformers' ``AutoModelFor...`` classes; None: the class that the configuration names,
            or the base model if it names none.

    Raises:
        ConfigError: there is no such class, or it cannot be built from this configuration.
    """
    if isinstance(config, dict):
        if task:
            raise ConfigError(f"--task is for models of transformers: {config['_class_name']} is one of diffusers.")
        factory, name = _diffusers_class(config["_class_name"]), config["_class_name"]
    else:
        factory, name = _auto_class(task) if task else _named_class(config), type(config).__name__
    try:
        with torch.device("meta"):
            model = factory(config)
    except Exception as error:  # whatever a model's constructor raises
        raise ConfigError(f"no model can be built from this {name}: {_first_line(error)}") from error
    return model.eval()


def _diffusers_class(name: str) -> Factory:
    try:
        library = importlib.import_module("diffusers")
    except ImportError as error:
        raise ConfigError(
            f"the configuration is of {name}, a class of diffusers, which is not installed. Run pip install diffusers."
        ) from error
    found = getattr(library, name, None)
    if not isinstance(found, type) or not issubclass(found, nn.Module):
        raise ConfigError(
            f"diffusers has no model {name!r}, which the configuration names. Install a version that has."
        )
    return cast(Factory, found.from_config)  # type: ignore[attr-defined]  # of its ConfigMixin


def _named_class(config: PreTrainedConfig) -> Factory:
    name = next(iter(config.architectures or []), None)
    if name is None:
        return cast(Factory, AutoModel.from_config)
    found: Factory | None = getattr(transformers, name, None)
    if found is None:
        raise ConfigError(f"transformers has no class {name!r}, which the configuration names. Choose one with --task.")
    return found


def _auto_class(task: str) -> Factory:
    prefix = "AutoModelFor"
    tasks = sorted(name.removeprefix(prefix) for name in dir(transformers) if name.startswith(prefix))
    if task not in tasks:
        raise ConfigError(f"--task must be one of {', '.join(tasks)}: got {task!r}.")
    return cast(Factory, getattr(transformers, prefix + task).from_config)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
