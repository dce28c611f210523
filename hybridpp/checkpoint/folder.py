"""Folders of weights as Hugging Face libraries write and read them."""

import copy
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybridpp.checkpoint.pretrained import open_pretrained
from hybridpp.checkpoint.read import Contents, open_plain
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


def open_folder(model: nn.Module, path: Path, strict: bool) -> Contents:
    """What a folder holds for a model. No weight is read before :attr:`Contents.read` is called.

    Raises:
        CheckpointError: there are no weights, or, if ``strict``, names are missing or unexpected.
    """
    if not path.is_dir():
        raise CheckpointError(f"there is no folder {path}. Give the folder that save_model wrote.")
    return open_pretrained(model, path, strict) if isinstance(model, PreTrainedModel) else open_plain(path)
