"""Write a rank's part of a checkpoint: safetensors files, tensor by tensor, with digests computed while writing."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hybridpp.checkpoint.boxes import Box, full_box, split_box
from hybridpp.checkpoint.digest import new_digest, written_as
from hybridpp.checkpoint.manifest import Chunk, FileEntry, TensorEntry
from hybridpp.checkpoint.safetensors_file import StoredSpec, header, stored_name, values

FILE_BYTES = 2**30
"""The most that a data file holds."""


class Holding(NamedTuple):
    """What a rank holds of a tensor of a checkpoint.

    Attributes:
        key: of the tensor in the checkpoint.
        dtype: in the checkpoint, when it is written.
        shape: of the full tensor.
        parts: boxes of the full tensor, each with a view of the rank's memory that has its shape.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Sequence[tuple[Box, Tensor]]

    @classmethod
    def of_all(cls, key: str, tensor: Tensor) -> "Holding":
        """A full tensor."""
        return cls(key, tensor.dtype, tuple(tensor.shape), [(full_box(tensor.shape), tensor)])

    @property
    def dtype_name(self) -> str:
        """The dtype as a checkpoint names it.

        Raises:
            CheckpointError: checkpoints cannot hold it.
        """
        return stored_name(self.key, self.dtype)


class _Part(NamedTuple):
    """A piece of a holding in a file."""

    holding: Holding
    box: Box
    view: Tensor
    name: str

    @property
    def nbytes(self) -> int:
        return self.box.size * self.holding.dtype.itemsize


class WrittenFiles(NamedTuple):
    """What a rank has written.

    Attributes:
        files: by name.
        tensors: parts of the checkpoint's tensors, by key.
    """

    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]


def write_holdings(
    folder: Path, prefix: str, holdings: Iterable[Holding], file_bytes: int = FILE_BYTES
) -> WrittenFiles:
    """Write tensors to new files of a folder. On the host, one part of at most ``file_bytes`` is in memory at a time.

    Args:
        folder: an existing one.
        prefix: of the names of the files, which do not exist yet.
        holdings: what is written.
        file_bytes: the most that a file holds, without its header.

    Raises:
        CheckpointError: a dtype cannot be stored.
        OSError: the files cannot be written; those that were are removed.
    """
    written = WrittenFiles({}, {})
    started: list[Path] = []
    try:
        for number, parts in enumerate(_by_file(holdings, file_bytes)):
            path = folder / f"{prefix}.{number:05d}.safetensors"
            started.append(path)
            written.files[path.name] = _write_file(path, parts)
            for part in parts:
                _note(written.tensors, part, path.name)
    except BaseException:
        remove(started)
        raise
    return written


def remove(paths: Iterable[Path]) -> None:
    """Remove files that may exist, as far as that is possible."""
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError:
            continue  # the next save removes it


def _note(tensors: dict[str, TensorEntry], part: _Part, file: str) -> None:
    holding = part.holding
    before = tensors[holding.key].chunks if holding.key in tensors else ()
    chunks = (*before, Chunk(part.box, file, part.name))
    tensors[holding.key] = TensorEntry(holding.dtype_name, holding.shape, chunks)


def _by_file(holdings: Iterable[Holding], file_bytes: int) -> Iterator[list[_Part]]:
    """What each file holds. Larger elements come first, so that all are aligned."""
    parts = sorted(_parts(holdings, file_bytes), key=lambda part: -part.holding.dtype.itemsize)
    current: list[_Part] = []
    size = 0
    for part in parts:
        if current and size + part.nbytes > file_bytes:
            yield current
            current, size = [], 0
        current.append(part)
        size += part.nbytes
    if current:
        yield current


def _parts(holdings: Iterable[Holding], file_bytes: int) -> Iterator[_Part]:
    for holding in holdings:
        limit, number = file_bytes // holding.dtype.itemsize, 0
        for box, view in holding.parts:
            for small in split_box(box, limit):
                inner = view[small.seen_from(box.start).slices] if small is not box else view
                yield _Part(holding, small, inner, f"{holding.key}#{number}")
                number += 1


def _write_file(path: Path, parts: Sequence[_Part]) -> FileEntry:
    digest, size = new_digest(), 0
    with path.open("xb") as file:
        for data in _blocks(parts):
            file.write(data)
            digest.update(data)
            size += data.nbytes
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(size, written_as(digest))


def _blocks(parts: Sequence[_Part]) -> Iterator[memoryview]:
    for part in parts:
        stored_name(part.holding.key, part.holding.dtype)  # refuses a dtype by the tensor's name
    yield memoryview(header([(part.name, StoredSpec(part.holding.dtype, part.box.shape)) for part in parts]))
    for part in parts:
        yield values(part.view, part.holding.dtype)
