"""Save and open folders of weights in Hugging Face's layout, and single files in torch's."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hybridpp.checkpoint.atomic_replace import replace_weights
from hybridpp.checkpoint.folder_kind import has_weights, other_kind
from hybridpp.checkpoint.hub_format import format_of
from hybridpp.checkpoint.hub_tensors import hub_groups, plain_groups
from hybridpp.checkpoint.index import CONFIG
from hybridpp.checkpoint.new_output import why_not_written
from hybridpp.checkpoint.older_config import add_older_names
from hybridpp.checkpoint.read import CheckpointContents, open_plain
from hybridpp.checkpoint.remote_path import dangling_link
from hybridpp.checkpoint.safetensors_file import StoredSpec
from hybridpp.checkpoint.single_file import StreamedFile, open_file, replace_file, stage_file, tied_names
from hybridpp.checkpoint.staging_folder import remove_leftovers, stage
from hybridpp.checkpoint.streamed_folder import StreamedFolder
from hybridpp.errors import CheckpointError, PeerError, text_of
from hybridpp.nn.pretrained_model import is_pretrained_model, without_progress_bars
from hybridpp.saving import SAFE_SUFFIXES, is_file_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ADAPTER = "adapter_config.json"


class SaveTarget:
    """Where a model is to be saved: a folder, or one file if the path ends as one (``.safetensors``, ``.pt``, …).

    Existing weights are kept until everything new is written next to them, so there must be room for both. Call
    :meth:`plan`, then :meth:`write_next` for each file, then :meth:`finish`; or :meth:`write`, which does all of it.

    Args:
        path: created if it does not exist.
        model: gives class and config; its weights are not read.

    Raises:
        CheckpointError: the path is not writable.
    """

    def __init__(self, path: Path, model: nn.Module):
        self._path = path
        self._model = model
        self._format = format_of(model)
        self._writer: StreamedFolder | StreamedFile | None = None
        self._num_written = 0
        with self._errors_explained():
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

    def plan(
        self,
        specs: Mapping[str, StoredSpec],
        aliases: Mapping[str, str],
        dtype: torch.dtype | None,
        max_shard_size: str,
    ) -> list[tuple[str, ...]]:
        """Decide what the files hold; write the config of a model that has one, as its library does.

        Args:
            specs: of every parameter and persistent buffer that the state dict has, by name.
            aliases: other names of tied ones, each with the name in ``specs``.
            dtype: of the floating-point tensors, for the config.
            max_shard_size: size of a file in a folder, like ``"1024MB"``; unless the model's library reads one only.

        Returns:
            For each file, the names of the tensors that :meth:`write_next` takes, in order.
        """
        with self._errors_explained():
            groups = plain_groups(specs, aliases)
            if self._is_file:
                self._writer = StreamedFile(groups, is_safe=self._path.suffix in SAFE_SUFFIXES)
                return [self._writer.reads]
            if is_pretrained_model(self._model):
                # transformers writes the names that older versions and the hub know, and takes dtype and ties from a
                # model: the complete model on the meta device replaces the one that holds only a stage.
                shell = _shell(self._model, dtype)
                with without_progress_bars():
                    shell.save_pretrained(self._staged, state_dict={})  # the config, and what belongs to it
                add_older_names(self._staged / CONFIG)
                groups = hub_groups(shell, specs, aliases)
            self._format.write_config(self._staged)
            one_file = self._format.is_one_file
            self._writer = StreamedFolder(groups, None if one_file else max_shard_size, self._format.names)
            return [file.reads for file in self._writer.files]

    def write_next(self, tensors: Iterable[Tensor], written: Callable[[int], Any] | None = None) -> None:
        """Write the next file that :meth:`plan` returned.

        Args:
            tensors: as named there; one is taken at a time.
            written: called with the number of bytes of each tensor in the file, after it.

        Raises:
            CheckpointError: it cannot be written. A load finds the old weights.
        """
        assert self._writer is not None, "plan was called"
        with self._errors_explained():
            if isinstance(self._writer, StreamedFile):
                self._writer.write(self._staged, tensors, written)
                return
            file = self._writer.files[self._num_written]
            self._num_written += 1
            self._writer.write(self._staged / file.name, file, tensors, written)

    def finish(self) -> None:
        """Replace what was there by what was written.

        Raises:
            CheckpointError: that fails. A load finds either the old weights or the new ones, complete.
        """
        with self._errors_explained():
            if isinstance(self._writer, StreamedFolder):
                self._writer.write_index(self._staged)
                replace_weights(self._staged, self._path, self._format.names)
            else:
                replace_file(self._staged, self._path)

    def write(self, state: Mapping[str, Tensor], dtype: torch.dtype | None, max_shard_size: str) -> None:
        """Write a model's complete state; a Hugging Face model with its config, so that ``from_pretrained`` reads it.

        Args:
            state: every parameter and persistent buffer, by name.
            dtype, max_shard_size: see :meth:`plan`.

        Raises:
            CheckpointError: something cannot be written. A load finds either the old weights or the new ones, complete.
        """
        aliases = tied_names(state)
        specs = {name: StoredSpec.of(tensor) for name, tensor in state.items() if name not in aliases}
        try:
            for names in self.plan(specs, aliases, dtype, max_shard_size):
                self.write_next(state[name] for name in names)
            self.finish()
        except Exception:
            self.discard()
            raise

    def discard(self) -> None:
        """Remove staged files: nothing will be written."""
        with suppress(OSError):
            if self._is_file:
                self._staged.unlink(missing_ok=True)
            else:
                remove_leftovers(self._path)

    @contextmanager
    def _errors_explained(self) -> Iterator[None]:
        """Turn errors of the file system into ones with advice."""
        try:
            yield
        except (CheckpointError, PeerError):
            raise
        except Exception as error:  # transformers, safetensors and torch.save have no error in common
            why = dangling_link(self._path) or why_not_written(error, self._path)
            raise CheckpointError(
                f"{self._path} cannot be written: {why}. Free disk space, check permissions, or pass another path. A "
                "load finds either the old weights or the new ones, complete."
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
            dangling = dangling_link(path)
            why = f": {dangling}" if dangling else ""
            raise CheckpointError(f"there is no folder or file {path}{why}. Pass the folder that save_model wrote.")
        kind = "" if has_weights(path) else other_kind(path)
        if kind:
            raise CheckpointError(
                f"{path} holds no weights of a model alone. {kind}Pass the folder that save_model wrote."
            )
        if not is_pretrained_model(model):
            return open_plain(path, from_pretrained=True, accepted=format_of(model).accepted)
        # transformers' loading takes 3 s to import, which jobs without its models do not need.
        from hybridpp.checkpoint.pretrained import open_pretrained  # noqa: PLC0415

        return open_pretrained(model, path, strict)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {text_of(error)}. Check permissions, or pass another path."
        ) from error
