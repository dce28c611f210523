"""A complete model in one file: a state dict with the model's own names, in torch's format."""

import os
import re
import secrets
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridpp.checkpoint.hub_tensors import OutputGroup
from hybridpp.checkpoint.read import CheckpointContents, InMemory, StoredTensor, open_plain
from hybridpp.checkpoint.remote_path import sync
from hybridpp.checkpoint.safetensors_file import write_safetensors
from hybridpp.errors import CheckpointError, named
from hybridpp.nn.torch_private import storage_id
from hybridpp.saving import SAFE_SUFFIXES


def stage_file(path: Path) -> Path:
    """Create an empty file next to ``path``, and remove files that killed saves to ``path`` left there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{path.name}.hybridpp-save-"
    leftovers = re.compile(re.escape(prefix) + "[0-9a-f]{8}", re.ASCII)
    for leftover in path.parent.iterdir():
        if leftovers.fullmatch(leftover.name) and (leftover.is_symlink() or not leftover.is_dir()):
            leftover.unlink(missing_ok=True)
    staged = path.parent / f"{prefix}{secrets.token_hex(4)}"
    staged.touch(exist_ok=False)
    return staged


class StreamedFile:
    """A file of weights that is being written; one of safetensors with one tensor in memory.

    Args:
        groups: each one tensor with its names.
        is_safe: whether it is a safetensors file, or one of ``torch.save``, which needs all tensors at once.

    Attributes:
        reads: names of the tensors that :meth:`write` takes, in order.
    """

    def __init__(self, groups: Sequence[OutputGroup], *, is_safe: bool):
        self._is_safe = is_safe
        self._groups = sorted(groups, key=_element_size) if is_safe else list(groups)
        self.reads = tuple(source for group in self._groups for source in group.sources)

    def write(self, path: Path, tensors: Iterable[Tensor], written: Callable[[int], Any] | None = None) -> None:
        """Write it to an empty file, and sync it.

        Args:
            path: of the file.
            tensors: in the order of :attr:`reads`.
            written: called with the number of bytes of each tensor, after it.
        """
        if self._is_safe:
            specs = {name: spec for group in self._groups for name, spec in group.outputs.items()}
            pairs = zip(self._groups, tensors, strict=True)
            write_safetensors(path, specs, (tensor for group, tensor in pairs for _ in group.outputs), written)
            return
        torch.save({name: tensor for group in self._own(tensors) for name, tensor in group.items()}, path)
        sync(path)

    def _own(self, tensors: Iterable[Tensor]) -> Iterator[dict[str, Tensor]]:
        """Each tensor under its names, in memory of its own: of a view, torch.save writes all that it is a view of."""
        for group, tensor in zip(self._groups, tensors, strict=True):
            is_view = tensor.untyped_storage().nbytes() != tensor.nbytes
            yield dict.fromkeys(group.outputs, tensor.clone() if is_view else tensor)


def _element_size(group: OutputGroup) -> int:
    return -next(iter(group.outputs.values())).dtype.itemsize


def replace_file(staged: Path, path: Path) -> None:
    """Replace ``path`` by a file that is complete and synced."""
    os.replace(staged, path)
    sync(path.parent)


def tied_names(state: Mapping[str, Tensor]) -> dict[str, str]:
    """The names of tensors that are the memory of one before them, each with the name of that one."""
    first: dict[Any, str] = {}
    found = {}
    for name, tensor in state.items():
        memory = (storage_id(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        if memory in first and tensor.numel() and not tensor.is_meta:
            found[name] = first[memory]
        first.setdefault(memory, name)
    return found


def open_file(path: Path) -> CheckpointContents:
    """Open a file; tensors are read on demand.

    Raises:
        CheckpointError: it is broken, is not a state dict, or would execute code.
    """
    if path.suffix in SAFE_SUFFIXES:
        return open_plain(path)
    try:
        # Memory-mapped, so that ranks of one host share pages; files of old versions of torch cannot be mapped.
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # of a broken zip file, a broken pickle, a forbidden one, …
        raise CheckpointError(
            f"{path} cannot be read as a file of weights: {named(error)}. Pass a .safetensors file, "
            "or a state dict that torch.save wrote."
        ) from error
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        kind = f"a dict with {sorted(map(str, found))[:8]}" if isinstance(found, dict) else f"a {type(found).__name__}"
        raise CheckpointError(
            f"{path} holds no state dict, but {kind}. Save model.state_dict() alone: torch.save(state, path)."
        )

    def read(names: Collection[str]) -> Iterator[tuple[str, StoredTensor]]:
        return ((name, InMemory(found[name])) for name in names)

    return CheckpointContents({str(name): tuple(tensor.shape) for name, tensor in found.items()}, read)
