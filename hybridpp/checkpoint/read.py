"""Single tensors, or parts of them, out of a folder of weights: who owns a part of a model reads that, and no more."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybridpp.errors import CheckpointError

SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Stored(Protocol):
    """A tensor of a folder, of which all or a part is to be brought to the host."""

    def whole(self) -> Tensor:
        """All of it."""

    def narrow(self, dim: int, start: int, length: int, /) -> Tensor:
        """A range along a dimension, as ``torch.narrow`` gives it; from a file, no more is read."""


@dataclass(frozen=True)
class InMemory:
    """A :class:`Stored` that had to be made whole: converted from what the files hold."""

    tensor: Tensor

    def whole(self) -> Tensor:
        return self.tensor

    def narrow(self, dim: int, start: int, length: int, /) -> Tensor:
        return self.tensor.narrow(dim, start, length)


@dataclass(frozen=True)
class InFile:
    """A :class:`Stored` in an open safetensors file."""

    handle: Any
    key: str

    def whole(self) -> Tensor:
        tensor: Tensor = self.handle.get_tensor(self.key)
        return tensor

    def narrow(self, dim: int, start: int, length: int, /) -> Tensor:
        part: Tensor = self.handle.get_slice(self.key)[(slice(None),) * dim + (slice(start, start + length),)]
        return part


@dataclass(frozen=True)
class Contents:
    """What a folder holds for a model, by the model's names.

    Attributes:
        shapes: of everything there is.
        read: gives the tensors of some names, one after another and in no particular order. Use each before the next:
            its file is open until then. Besides it, only what was read of its file is in memory.
    """

    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[Collection[str]], Iterator[tuple[str, Stored]]]


class Place(NamedTuple):
    """A tensor on disk: its file, and its name in there."""

    file: Path
    key: str


def find_tensors(path: Path) -> dict[str, Place]:
    """Where each tensor of a folder is: in ``model.safetensors``, else in what the index names, else in any file.

    Raises:
        CheckpointError: a file that has to be looked into is broken.
    """
    if not (path / SINGLE_FILE).is_file() and (path / INDEX).is_file():
        return {key: Place(path / name, key) for key, name in _listed(path / INDEX).items()}
    single = [path / SINGLE_FILE] if (path / SINGLE_FILE).is_file() else []
    places: dict[str, Place] = {}
    for file in single or sorted(path.glob("*.safetensors")):
        with _opened(file) as handle:
            places |= {key: Place(file, key) for key in handle.keys()}  # noqa: SIM118  # no mapping
    return places


def _listed(index: Path) -> dict[str, str]:
    try:
        listed: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{index} does not say which file holds which weight ({type(error).__name__}: {error}). Save it anew."
        ) from error
    return listed


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """A safetensors file; whatever fails to be read of it is a :class:`~hybridpp.errors.CheckpointError`."""
    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{file} cannot be read as a safetensors file: {error}. Copy it again, or save the model again."
        ) from error


def shapes_of(places: Mapping[str, Place]) -> dict[str, tuple[int, ...]]:
    """The shape of each, from the headers of the files.

    Raises:
        CheckpointError: a file is broken, missing or lacks a tensor.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file, names in _by_file(places).items():
        with _opened(file) as handle:
            shapes |= {name: tuple(handle.get_slice(places[name].key).get_shape()) for name in names}
    return shapes


def open_tensors(places: Mapping[str, Place]) -> Iterator[tuple[str, Stored]]:
    """Each tensor with its name, file by file: a file is mapped into memory only while its tensors are read.

    Raises:
        CheckpointError: a file is broken, missing or lacks a tensor.
    """
    for file, names in _by_file(places).items():
        with _opened(file) as handle:
            for name in names:
                yield name, InFile(handle, places[name].key)


def _by_file(places: Mapping[str, Place]) -> dict[Path, list[str]]:
    files: dict[Path, list[str]] = {}
    for name, place in places.items():
        files.setdefault(place.file, []).append(name)
    return files


def open_plain(path: Path) -> Contents:
    """A folder whose names are the model's.

    Raises:
        CheckpointError: there are no weights, or a file is broken.
    """
    places = find_tensors(path)
    if not places:
        raise CheckpointError(f"{path} holds no *.safetensors file. Give the folder that save_model wrote.")

    def read(names: Collection[str]) -> Iterator[tuple[str, Stored]]:
        return open_tensors({name: places[name] for name in names})

    return Contents(shapes_of(places), read)
