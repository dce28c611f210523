"""Read single tensors, or ranges of them, from a folder of weights: a rank reads only what it owns."""

import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from hybridpp.checkpoint.find_tensors import TensorLocation, find_tensors, opened
from hybridpp.checkpoint.index import DIFFUSION, MODEL, WeightNames
from hybridpp.errors import CheckpointError

# Before more are read, a file is mapped anew.
_MAX_MAPPED_BYTES = 2**25


class StoredTensor(Protocol):
    """A stored tensor that can be read completely or in part."""

    def full(self) -> Tensor:
        """The complete tensor."""

    def narrow(self, dim: int, start: int, length: int, /) -> Tensor:
        """A range along a dimension, as by ``torch.narrow``; from a file, only the range is read."""


@dataclass(frozen=True)
class InMemory:
    """A :class:`StoredTensor` in memory: converted from the tensors of files."""

    tensor: Tensor

    def full(self) -> Tensor:
        return self.tensor

    def narrow(self, dim: int, start: int, length: int, /) -> Tensor:
        return self.tensor.narrow(dim, start, length)


@dataclass(frozen=True)
class InFile:
    """A :class:`StoredTensor` in an open safetensors file."""

    handle: Any
    key: str

    @property
    def nbytes(self) -> int:
        """Of the complete tensor, at most: types of less than a byte count as one."""
        view = self.handle.get_slice(self.key)
        bits = re.search(r"\d+", view.get_dtype())
        num_elements: int = prod(view.get_shape())
        return num_elements * (max(8, int(bits.group())) // 8 if bits else 1)

    def full(self) -> Tensor:
        tensor: Tensor = self.handle.get_tensor(self.key)
        return tensor

    def narrow(self, dim: int, start: int, length: int, /) -> Tensor:
        part: Tensor = self.handle.get_slice(self.key)[(slice(None),) * dim + (slice(start, start + length),)]
        return part


@dataclass(frozen=True)
class CheckpointContents:
    """The tensors of a folder, by the model's names.

    Attributes:
        shapes: the shape of every tensor.
        read: yields the tensors of some names in any order. Use each before the next one: its file is open until then.
            At most one file is mapped at a time, of which 32 MiB or one tensor are in memory.
    """

    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[Collection[str]], Iterator[tuple[str, StoredTensor]]]


def shapes_of(locations: Mapping[str, TensorLocation]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor, from the headers of the files.

    Raises:
        CheckpointError: a file is broken, missing or lacks a tensor.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file, names in _by_file(locations).items():
        with opened(file) as handle:
            shapes |= {name: tuple(handle.get_slice(locations[name].key).get_shape()) for name in names}
    return shapes


def open_tensors(locations: Mapping[str, TensorLocation]) -> Iterator[tuple[str, StoredTensor]]:
    """Yield each tensor with its name, file by file. Use each before the next one.

    A file is mapped only while its tensors are read, and anew after 32 MiB: pages that were read count as this
    process's memory for as long as they are mapped, and a file may be larger than what a rank holds.

    Raises:
        CheckpointError: a file is broken, missing or lacks a tensor.
    """
    for file, listed in _by_file(locations).items():
        names = deque(listed)
        while names:
            with opened(file) as handle:
                num_bytes = 0
                while names:
                    stored = InFile(handle, locations[names[0]].key)
                    num_bytes += stored.nbytes
                    if num_bytes > max(_MAX_MAPPED_BYTES, stored.nbytes):
                        break
                    yield names.popleft(), stored


def _by_file(locations: Mapping[str, TensorLocation]) -> dict[Path, list[str]]:
    files: dict[Path, list[str]] = {}
    for name, location in locations.items():
        files.setdefault(location.file, []).append(name)
    return files


def open_plain(
    path: Path, from_pretrained: bool = False, accepted: Sequence[WeightNames] = (MODEL, DIFFUSION)
) -> CheckpointContents:
    """Open a folder or a safetensors file whose names are the model's.

    Args:
        path: of the folder or file.
        from_pretrained, accepted: see :func:`~hybridpp.checkpoint.find_tensors.find_tensors`.

    Raises:
        CheckpointError: there are no weights, or a file is broken.
    """
    locations = find_tensors(path, from_pretrained, accepted)
    if not locations:
        raise CheckpointError(f"{path} holds no *.safetensors file. Pass the folder that save_model wrote, or a file.")

    def read(names: Collection[str]) -> Iterator[tuple[str, StoredTensor]]:
        return open_tensors({name: locations[name] for name in names})

    return CheckpointContents(shapes_of(locations), read)
