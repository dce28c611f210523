"""Single tensors out of a folder of weights: who owns a part of a model reads that part, and no more."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open
from torch import Tensor

from hybridpp.errors import CheckpointError

SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Contents:
    """What a folder holds for a model, by the model's names.

    Attributes:
        shapes: of everything there is.
        read: gives the tensors of some names, on the host, one after another and in no particular order. Let go of
            each before the next: besides it, only what was read of its file is in memory.
    """

    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[Collection[str]], Iterator[tuple[str, Tensor]]]


class Place(NamedTuple):
    """A tensor on disk: its file, and its name in there."""

    file: Path
    key: str


def find_tensors(path: Path) -> dict[str, Place]:
    """Where each tensor of a folder is: in ``model.safetensors``, else in what the index names, else in any file."""
    if not (path / SINGLE_FILE).is_file() and (path / INDEX).is_file():
        listed = json.loads((path / INDEX).read_text())["weight_map"]
        return {key: Place(path / name, key) for key, name in listed.items()}
    single = [path / SINGLE_FILE] if (path / SINGLE_FILE).is_file() else []
    places: dict[str, Place] = {}
    for file in single or sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            places |= {key: Place(file, key) for key in handle.keys()}  # noqa: SIM118  # no mapping
    return places


def shapes_of(places: Mapping[str, Place]) -> dict[str, tuple[int, ...]]:
    """The shape of each, from the headers of the files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file, names in _by_file(places).items():
        with safe_open(file, framework="pt") as handle:
            shapes |= {name: tuple(handle.get_slice(places[name].key).get_shape()) for name in names}
    return shapes


def read_tensors(places: Mapping[str, Place]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor with its name, file by file: a file is mapped into memory only while its tensors are read."""
    for file, names in _by_file(places).items():
        with safe_open(file, framework="pt") as handle:
            for name in names:
                yield name, handle.get_tensor(places[name].key)


def _by_file(places: Mapping[str, Place]) -> dict[Path, list[str]]:
    files: dict[Path, list[str]] = {}
    for name, place in places.items():
        files.setdefault(place.file, []).append(name)
    return files


def open_plain(path: Path) -> Contents:
    """A folder whose names are the model's.

    Raises:
        CheckpointError: there are no weights.
    """
    places = find_tensors(path)
    if not places:
        raise CheckpointError(f"{path} holds no *.safetensors file. Give the folder that save_model wrote.")

    def read(names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        return read_tensors({name: places[name] for name in names})

    return Contents(shapes_of(places), read)
