"""The files of a folder that hold weights, by Hugging Face's naming."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hybridpp.checkpoint.schema import anything, mapping, read_json, record, text
from hybridpp.errors import CheckpointError, text_of


@dataclass(frozen=True)
class WeightNames:
    """The names of the files that hold the weights of a model.

    Attributes:
        base: what they begin with.
    """

    base: str

    @property
    def single(self) -> str:
        """The one file, if there is one."""
        return f"{self.base}.safetensors"

    @property
    def index(self) -> str:
        """The index of several files."""
        return f"{self.base}.safetensors.index.json"

    def unique(self, name: str, identity: str) -> str:
        """The name of a file, made one that no other save gives."""
        return f"{self.base}-{identity}{name.removeprefix(self.base)}"


MODEL, DIFFUSION = WeightNames("model"), WeightNames("diffusion_pytorch_model")
"""As transformers and most others call them, and as diffusers does."""

MOST_INDEX_BYTES = 2**28
"""Of an index of files; that of 100,000 weights has 10 MB."""
CONFIG = "config.json"
MOST_CONFIG_BYTES = 2**26
# Key of config.json: the file, or the index, that `from_pretrained` reads instead of the default ones.
POINTER = "transformers_weights"

_SAVED = r"(model|diffusion_pytorch_model)(-[0-9a-f]{8})?(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"
_OF_A_MODEL = re.compile(rf"{_SAVED}|(diffusion_)?pytorch_model(-\d{{5}}-of-\d{{5}})?\.bin(\.index\.json)?", re.ASCII)
# What a save names otherwise than a save before it, until all of it is there.
_UNFINISHED = re.compile(
    r"(model|diffusion_pytorch_model)(-[0-9a-f]{8}(-\d{5}-of-\d{5})?|-\d{5}-of-\d{5})\.safetensors(\.index\.json)?",
    re.ASCII,
)


_INDEX = record({"weight_map": mapping(text())}, {"metadata": anything}, is_open=True)


def names_in(folder: Path, accepted: Sequence[WeightNames] = (MODEL, DIFFUSION)) -> WeightNames:
    """The names of the weights of a folder: the first of ``accepted`` that are there, else the first."""
    found = (names for names in accepted if (folder / names.single).is_file() or (folder / names.index).is_file())
    return next(found, accepted[0])


def may_be_unfinished(name: str) -> bool:
    """Whether a file of this name in a folder may be one that a save has moved there before it counts."""
    return _UNFINISHED.fullmatch(name) is not None


def listed(index: Path) -> dict[str, str]:
    """The file of each weight, by the weight's name.

    Raises:
        CheckpointError: it is not a valid index, or names a file that is not in its folder.
    """
    try:
        found = read_json(index, MOST_INDEX_BYTES)
        _INDEX(found, "")
        names: dict[str, str] = found["weight_map"]
        for name in set(names.values()):
            _check_inside(name, index.parent)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{index} does not say which file holds which weight: {text_of(error)}. Save the model, or copy the "
            "folder, again."
        ) from error
    return names


def _check_inside(name: object, folder: Path) -> None:
    """Refuse a name of a file that is not inside the folder: an index must not name other files of the host.

    The file itself may be a link, as in the cache of Hugging Face's hub.
    """
    is_text = isinstance(name, str) and not any("\ud800" <= letter <= "\udfff" for letter in name)
    if not isinstance(name, str) or not is_text or not name or "\0" in name or "\\" in name:
        raise ValueError(f"{name!r:.120} is no name of a file")
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{name!r:.120} is not inside the folder")
    linked = next((parent for parent in path.parents if (folder / parent).is_symlink() and parent.name), None)
    if linked is not None:
        raise ValueError(f"{name!r:.120} is in {str(linked)!r}, which is a link to another folder")


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
        config = read_json(folder / CONFIG, MOST_CONFIG_BYTES)
        named: str | None = config.get(POINTER) if isinstance(config, dict) else None
        if named is not None:
            _check_inside(named, folder)
        return named
    except (OSError, ValueError):
        return None  # errors are reported where the config is needed


def files_of_a_model(folder: Path) -> set[str]:
    """The folder's files that are weights of its model, or an index of them, current or outdated.

    These are removed when others take their place, so their names decide, and nothing that is read from the folder: an
    index may name any file.
    """
    names = {path.name for path in folder.iterdir() if _OF_A_MODEL.fullmatch(path.name)}
    return {name for name in names if (folder / name).is_file() or (folder / name).is_symlink()}
