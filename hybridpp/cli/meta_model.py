"""A Hugging Face model on the meta device, built from its configuration."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias, cast

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig

from hybridpp.errors import ConfigError

Factory: TypeAlias = Callable[[PreTrainedConfig], nn.Module]


def load_config(name: str) -> PreTrainedConfig:
    """Read the configuration of a model, given a folder with a ``config.json`` or a name on the Hugging Face hub.

    Raises:
        ConfigError: there is none, or transformers cannot read it.
    """
    folder = Path(name)
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


def build(config: PreTrainedConfig, task: str | None = None) -> nn.Module:
    """The model on the meta device, in evaluation mode.

    Args:
        config: configuration of the model.
        task: suffix of one of transformers' ``AutoModelFor...`` classes; None: the class that the configuration names,
            or the base model if it names none.

    Raises:
        ConfigError: there is no such class, or it cannot be built from this configuration.
    """
    factory = _auto_class(task) if task else _named_class(config)
    try:
        with torch.device("meta"):
            model = factory(config)
    except Exception as error:  # whatever a model's constructor raises
        raise ConfigError(f"no model can be built from this {type(config).__name__}: {_first_line(error)}") from error
    return model.eval()


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
