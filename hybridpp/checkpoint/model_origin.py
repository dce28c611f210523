"""What a checkpoint says of the model before boost, so that the model can be exported without its script."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hybridpp.checkpoint.index import CONFIG, MOST_CONFIG_BYTES
from hybridpp.checkpoint.schema import read_json
from hybridpp.errors import CheckpointError, ConfigError, named, text_of
from hybridpp.nn.pretrained_model import is_pretrained_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MOST_LAYERS = 2000
_DEPTH = re.compile("(layers?|depth)$")


def described_origin(model: nn.Module, aliases: Mapping[str, str], dtypes: Mapping[str, torch.dtype]) -> dict[str, Any]:
    """Aliases, dtypes and configuration of a model, as JSON.

    Args:
        model: gives its configuration, if it is transformers'.
        aliases: other names of tied parameters, each with the first one.
        dtypes: of the tensors of its state dict, before boost.
    """
    names = {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items() if dtype.is_floating_point}
    usual = Counter(names.values()).most_common(1)
    config: dict[str, Any] | None = None
    if is_pretrained_model(model):
        config = json.loads(model.config.to_json_string())
    return {
        "aliases": dict(aliases),
        "dtype": usual[0][0] if usual else None,
        "other_dtypes": {name: dtype for name, dtype in names.items() if dtype != usual[0][0]},
        "config": config,
    }


def check_depth(folder: Path, own: Mapping[str, Any]) -> None:
    """Refuse a folder whose configuration has so many layers that a model of it would never be made.

    Args:
        folder: with a ``config.json``; what else is wrong with that is found where it is used.
        own: the configuration of the model that the folder is for, if it is known.

    Raises:
        CheckpointError: it has.
    """
    try:
        config = read_json(folder / CONFIG, MOST_CONFIG_BYTES)
    except (OSError, ValueError):
        return
    _check_depth(config, own, str(folder / CONFIG))


def _check_depth(config: Any, own: Any, where: str) -> None:
    for key, value in config.items() if isinstance(config, dict) else ():
        here = own.get(key) if isinstance(own, dict) else None
        most = max(_MOST_LAYERS, here if type(here) is int else 0)
        if type(value) is int and _DEPTH.search(key) and value > most:
            raise CheckpointError(
                f"{where} has {key} = {value}, and no model has more than {most} layers. Restore it from a copy."
            )
        _check_depth(value, here, where)


def model_shell(class_name: str | None, config: Mapping[str, Any] | None, folder: Path | None) -> nn.Module:
    """A model without values, whose class and configuration say how it is exported.

    Args:
        class_name: of the model that was saved; None: the one that the folder's configuration names.
        config: what the checkpoint says of its configuration.
        folder: has a ``config.json`` that is taken instead; None: ``config`` is.

    Returns:
        A model of transformers on the meta device; or an empty module, if there is no configuration.

    Raises:
        ConfigError: the folder has no configuration, or it is of another class.
        CheckpointError: the class is not one of transformers.
    """
    if folder is None and config is None:
        return nn.Module()
    # transformers takes 3 s to import, which models of other libraries do not need.
    import transformers  # noqa: PLC0415

    if folder is not None:
        check_depth(folder, {})
        try:
            made = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:  # of a file that is none, of entries of other types, …
            raise ConfigError(
                f"{folder} holds no configuration of a model: {text_of(error)}. Pass a folder with its config.json."
            ) from error
    else:
        assert config is not None
        _check_depth(config, {}, "the configuration in the checkpoint")
        rest = {key: value for key, value in config.items() if key != "model_type"}
        try:
            made = transformers.AutoConfig.for_model(config["model_type"], **rest)
        except Exception as error:  # of entries of other types
            raise CheckpointError(
                f"the configuration of the {class_name} in the checkpoint is not one that transformers "
                f"{transformers.__version__} knows: {text_of(error)}. Pass --config FOLDER, with its config.json."
            ) from error
    class_name = class_name or (made.architectures or ["a model without a class"])[0]
    kind: type[PreTrainedModel] | None = getattr(transformers, class_name, None)
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise CheckpointError(
            f"{class_name} is no class of transformers, so it cannot be converted without its script. Use "
            "booster.save_model or load_model there, or a file of torch.save."
        )
    if kind.config_class is None or not isinstance(made, kind.config_class):
        raise ConfigError(
            f"{folder} has the configuration of a {made.model_type}, and the checkpoint is of a {class_name}. Pass the "
            "folder of that model."
        )
    try:
        with torch.device("meta"):
            return kind(made)
    except Exception as error:  # of sizes that no model has
        raise CheckpointError(
            f"no {class_name} can be made of its configuration: {named(error)}. Pass --config FOLDER, "
            "with its config.json."
        ) from error
