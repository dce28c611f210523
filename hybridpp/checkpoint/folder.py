"""Save and open folders of weights in Hugging Face's layout, and single files in torch's."""

import copy
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn

from hybridpp.checkpoint.atomic_replace import replace_weights
from hybridpp.checkpoint.read import CheckpointContents, open_plain
from hybridpp.checkpoint.single_file import open_file, stage_file, without_aliases, write_file
from hybridpp.checkpoint.staging_folder import remove_leftovers, stage
from hybridpp.errors import CheckpointError
from hybridpp.nn.pretrained_model import is_pretrained_model
from hybridpp.saving import is_file_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ADAPTER = "adapter_config.json"


class SaveTarget:
    """Where a model is to be saved: a folder, or one file if the path ends as one (``.safetensors``, ``.pt``, …).

    Existing weights are kept until everything new is written next to them, so there must be room for both.

    Args:
        path: created if it does not exist.
        model: gives class and config; its weights are not read.

    Raises:
        CheckpointError: the path is not writable.
    """

    def __init__(self, path: Path, model: nn.Module):
        self._path = path
        self._model = model
        with _errors_explained(path):
            self._is_file = is_file_name(path) and not path.is_dir()
            self._check()
            self._staged = stage_file(path) if self._is_file else stage(path)

    def _check(self) -> None:
        if self._path.exists() and not self._path.is_dir() and not self._is_file:
            raise CheckpointError(
                f"a model is saved to a folder: {self._path} is a file. Pass another path, or one that ends with "
                ".safetensors or .pt, for a single file."
            )
        if is_pretrained_model(self._model) and (self._path / _ADAPTER).is_file():
            raise CheckpointError(
                f"{self._path} holds an adapter ({_ADAPTER}), which from_pretrained would apply to the saved model. "
                "Pass another path, or move the adapter away."
            )

    def write(self, state: dict[str, Tensor], dtype: torch.dtype | None, max_shard_size: str) -> None:
        """Write a model's complete state; a Hugging Face model with its config, so that ``from_pretrained`` reads it.

        Args:
            state: every parameter and persistent buffer, by name.
            dtype: of the floating-point tensors in ``state``, for the config.
            max_shard_size: size of a file in a folder, like ``"1024MB"``.

        Raises:
            CheckpointError: something cannot be written. A load finds either the old weights or the new ones, complete.
        """
        with _errors_explained(self._path):
            if self._is_file:
                write_file(state, self._staged, self._path)
                return
            try:
                self._stage_folder(state, dtype, max_shard_size)
                replace_weights(self._staged, self._path)
            except Exception:
                with suppress(OSError):  # the first error is more informative
                    remove_leftovers(self._path)
                raise

    def discard(self) -> None:
        """Remove staged files: nothing will be written."""
        with suppress(OSError):
            if self._is_file:
                self._staged.unlink()
            else:
                shutil.rmtree(self._staged)

    def _stage_folder(self, state: dict[str, Tensor], dtype: torch.dtype | None, max_shard_size: str) -> None:
        if is_pretrained_model(self._model):
            # transformers writes the names that older versions and the hub know, and takes dtype and ties from a model:
            # the complete model on the meta device replaces the one that holds only a stage.
            shell = _shell(self._model, dtype)
            shell.save_pretrained(self._staged, state_dict=state, max_shard_size=max_shard_size)
        else:
            # Tensors that share memory would be written under one name only.
            save_torch_state_dict(without_aliases(state), self._staged, max_shard_size=max_shard_size)


@contextmanager
def _errors_explained(path: Path) -> Iterator[None]:
    """Turn errors of the file system into ones with advice."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # transformers, safetensors and torch.save have no error in common
        raise CheckpointError(
            f"{path} cannot be written: {type(error).__name__}: {error}. Free disk space, check permissions, or pass "
            "another path. A load finds either the old weights or the new ones, complete."
        ) from error


def _shell(model: "PreTrainedModel", dtype: torch.dtype | None) -> "PreTrainedModel":
    with torch.device("meta"):
        shell = type(model)(copy.deepcopy(model.config))
    if model.can_generate():
        shell.generation_config = model.generation_config
    if dtype is not None:
        nn.Module.to(shell, dtype=dtype)
    return shell


def open_folder(model: nn.Module, path: Path, strict: bool) -> CheckpointContents:
    """Open a folder or a single file for a model. Weights are read by :attr:`CheckpointContents.read` only.

    Raises:
        CheckpointError: there are no weights, or, if ``strict``, names are missing or unexpected.
    """
    try:
        if path.is_file():
            return open_file(path)
        if not path.is_dir():
            raise CheckpointError(f"there is no folder or file {path}. Pass the folder that save_model wrote.")
        if not is_pretrained_model(model):
            return open_plain(path)
        # transformers' loading takes 3 s to import, which jobs without its models do not need.
        from hybridpp.checkpoint.pretrained import open_pretrained  # noqa: PLC0415

        return open_pretrained(model, path, strict)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Check permissions, or pass another path.") from error
