"""A Hugging Face model built from its configuration alone, without memory for its weights."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias, cast

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from hybridpp.errors import ConfigError

Factory: TypeAlias = Callable[[PreTrainedConfig], nn.Module]


def load_config(name: str) -> PreTrainedConfig:
    """The configuration of a model: a folder with a ``config.json``, or a model's name on the Hugging Face hub.

    Raises:
        ConfigError: there is none, or transformers does not know such models.
    """
    folder = Path(name)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ConfigError(f"{name} has no config.json. Give the folder that save_pretrained wrote.")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except OSError as error:
        raise ConfigError(
            f"no model {name!r}: there is no such folder, and the Hugging Face hub does not give one of that name. "
            "Check the name, or the connection."
        ) from error
    except Exception as error:  # of many kinds: unknown model types, settings that contradict each other
        raise ConfigError(f"transformers cannot read the configuration of {name!r}: {_first_line(error)}") from error
    return config


def build(config: PreTrainedConfig, task: str | None = None) -> nn.Module:
    """The model on the meta device, in evaluation mode.

    Args:
        config: of the model.
        task: the ending of one of transformers' ``AutoModelFor...`` classes; None takes the class that the
            configuration names, or the bare model where it names none.

    Raises:
        ConfigError: there is no such class, or it cannot be built from this configuration.
    """
    factory = _auto_class(task) if task else _named_class(config)
    try:
        with torch.device("meta"):
            model = factory(config)
        if isinstance(model, PreTrainedModel) and model._can_set_experts_implementation():
            # The one that fakes can run in every format; others compute for real there.
            model.set_experts_implementation("batched_mm")
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
        raise ConfigError(f"--task is one of {', '.join(tasks)}: got {task!r}.")
    return cast(Factory, getattr(transformers, prefix + task).from_config)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
