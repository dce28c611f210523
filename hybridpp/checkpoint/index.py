"""The files of a folder that hold weights, by Hugging Face's naming."""

import hashlib
import json
import re
from pathlib import Path, PurePosixPath

from hybridpp.errors import CheckpointError

SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
CONFIG = "config.json"
# Key of config.json: the file, or the index, that `from_pretrained` reads instead of the default ones.
POINTER = "transformers_weights"

_OF_A_MODEL = re.compile(
    r"model(-[0-9a-f]{8})?(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"
    r"|pytorch_model(-\d{5}-of-\d{5})?\.bin(\.index\.json)?"
)


def listed(index: Path) -> dict[str, str]:
    """The file of each weight, by the weight's name.

    Raises:
        CheckpointError: it is not a valid index.
    """
    try:
        found = json.loads(index.read_text())["weight_map"]
        if not isinstance(found, dict):
            raise TypeError("weight_map is no mapping")
        names: dict[str, str] = {key: _inside(name) for key, name in found.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{index} does not say which file holds which weight ({type(error).__name__}: {error}). Save it anew."
        ) from error
    return names


def _inside(name: object) -> str:
    """The name of a file inside the folder; an index must not name other files of the host."""
    if not isinstance(name, str) or not name or "\0" in name:
        raise ValueError(f"{name!r} is no name of a file")
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts:
        raise ValueError(f"{name!r} is not inside the folder")
    return name


def files_of(index: Path) -> set[str]:
    """The files that an index names; none if it is missing or invalid."""
    try:
        return set(listed(index).values()) if index.suffix == ".json" else set()
    except CheckpointError:
        return set()


def digest_of(index: Path) -> str | None:
    """Digest of an index; None if there is none."""
    return hashlib.sha256(index.read_bytes()).hexdigest() if index.is_file() else None


def pointed_to(folder: Path) -> str | None:
    """What the folder's ``config.json`` tells ``from_pretrained`` to read, if anything."""
    try:
        config = json.loads((folder / CONFIG).read_text())
        named = config.get(POINTER) if isinstance(config, dict) else None
        return None if named is None else _inside(named)
    except (OSError, ValueError):
        return None  # errors are reported where the config is needed


def files_of_a_model(folder: Path) -> set[str]:
    """The folder's files that are weights of its model, or an index of them, current or outdated."""
    named = {name for name in (p.name for p in folder.iterdir()) if _OF_A_MODEL.fullmatch(name)}
    for index in (INDEX, PICKLED_INDEX, pointed_to(folder) or INDEX):
        named |= {name for name in files_of(folder / index) if name.endswith((".safetensors", ".bin"))}
    return {name for name in named if (folder / name).is_file() or (folder / name).is_symlink()}
