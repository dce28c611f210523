"""A complete model in one file: a state dict with the model's own names, in torch's format."""

import os
import secrets
import zipfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from hybridpp.checkpoint.read import CheckpointContents, InMemory, StoredTensor, open_plain
from hybridpp.checkpoint.staging_folder import sync
from hybridpp.errors import CheckpointError
from hybridpp.nn.torch_private import storage_id
from hybridpp.saving import SAFE_SUFFIXES


def stage_file(path: Path) -> Path:
    """Create an empty file next to ``path``, and remove files that killed saves to ``path`` left there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{path.name}.hybridpp-save-"
    for leftover in path.parent.iterdir():
        if leftover.name.startswith(prefix):
            leftover.unlink()
    staged = path.parent / f"{prefix}{secrets.token_hex(4)}"
    staged.touch(exist_ok=False)
    return staged


def write_file(state: Mapping[str, Tensor], staged: Path, path: Path) -> None:
    """Write a state dict, and replace ``path`` by it when it is complete."""
    try:
        if path.suffix in SAFE_SUFFIXES:
            save_file(
                {n: tensor.contiguous() for n, tensor in without_aliases(state).items()}, staged, {"format": "pt"}
            )
        else:
            torch.save(dict(state), staged)
        sync(staged)
        os.replace(staged, path)
        sync(path.parent)
    except Exception:
        staged.unlink(missing_ok=True)
        raise


def without_aliases(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of tensors that share memory, so that each name of a tied weight is written."""
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        memory = storage_id(tensor)
        found[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
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
            f"{path} cannot be read as a file of weights: {type(error).__name__}: {error}. Pass a .safetensors file, "
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
