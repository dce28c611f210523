"""Folders of weights as Hugging Face libraries write and read them."""

import copy
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybridpp.errors import CheckpointError


def write_folder(
    model: nn.Module, state: dict[str, Tensor], path: Path, dtype: torch.dtype | None, max_shard_size: str
) -> None:
    """Write a model's whole state; a Hugging Face model with its config, so that ``from_pretrained`` reads it.

    Args:
        model: says which class and config; its own numbers are not read.
        state: every parameter and persistent buffer, by name.
        path: the folder; made if it does not exist.
        dtype: of the floating-point tensors in ``state``, for the config.
        max_shard_size: size of a file, like ``"1024MB"``.

    Raises:
        CheckpointError: ``path`` is a file.
    """
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"a model is saved to a folder: {path} is a file. Give another path.")
    path.mkdir(parents=True, exist_ok=True)
    if isinstance(model, PreTrainedModel):
        # transformers writes the names that older versions and the hub know, and reads dtype and ties off a model: a
        # shell of the whole model, without memory, stands in for the one that holds only a stage.
        shell = _shell(model, dtype)
        shell.save_pretrained(path, state_dict=state, max_shard_size=max_shard_size)
    else:
        save_torch_state_dict(state, path, max_shard_size=max_shard_size)


def _shell(model: PreTrainedModel, dtype: torch.dtype | None) -> PreTrainedModel:
    with torch.device("meta"):
        shell: PreTrainedModel = type(model)(copy.deepcopy(model.config))
    if model.can_generate():
        shell.generation_config = model.generation_config
    if dtype is not None:
        nn.Module.to(shell, dtype=dtype)
    return shell


def read_folder(model: nn.Module, path: Path, strict: bool) -> dict[str, Tensor]:
    """The whole state in a folder, by the model's names, on the host, in the dtypes of the files.

    Raises:
        CheckpointError: there are no weights, or, if ``strict``, names are missing or unexpected.
    """
    if not path.is_dir():
        raise CheckpointError(f"there is no folder {path}. Give the folder that save_model wrote.")
    if isinstance(model, PreTrainedModel):
        return _read_pretrained(model, path, strict)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path} holds no *.safetensors file. Give the folder that save_model wrote.")
    state: dict[str, Tensor] = {}
    for file in files:
        state.update(load_file(file))
    return state


def _read_pretrained(model: PreTrainedModel, path: Path, strict: bool) -> dict[str, Tensor]:
    try:
        loaded: Any = type(model).from_pretrained(path, output_loading_info=True, ignore_mismatched_sizes=False)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} does not hold weights for {type(model).__name__}: {error}") from error
    whole, info = loaded
    if strict and (info["missing_keys"] or info["unexpected_keys"]):
        raise CheckpointError(
            f"{path} does not fit {type(model).__name__}: missing {sorted(info['missing_keys'])}, "
            f"unexpected {sorted(info['unexpected_keys'])}. Use strict=False to load what fits."
        )
    missing = set(info["missing_keys"])
    return {name: tensor for name, tensor in whole.state_dict().items() if name not in missing}
