"""Write a rank's part of a checkpoint: safetensors files, tensor by tensor, with digests computed while writing."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridpp.checkpoint.boxes import Box, full_box, split_box
from hybridpp.checkpoint.digest import new_digest, written_as
from hybridpp.checkpoint.manifest import Chunk, FileEntry, TensorEntry
from hybridpp.checkpoint.remote_path import AnyPath
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


class WritablePart(NamedTuple):
    """A part of a tensor that goes into one file.

    Attributes:
        key: of the tensor in the checkpoint.
        spec: of the full tensor, with the dtype that is written.
        box: which part.
        name: of the part in its file.
        load: gives its values when it is written.
    """

    key: str
    spec: StoredSpec
    box: Box
    name: str
    load: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.box.size * self.spec.dtype.itemsize


class WrittenFiles(NamedTuple):
    """What a rank has written.

    Attributes:
        files: by name.
        tensors: parts of the checkpoint's tensors, by key.
    """

    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]


def write_holdings(
    folder: AnyPath, prefix: str, holdings: Iterable[Holding], file_bytes: int = FILE_BYTES
) -> WrittenFiles:
    """Write tensors to new files of a folder. On the host, one part of at most ``file_bytes`` is in memory at a time.

    Args:
        folder: an existing one. Files for a remote one are written to the folder for temporary files first, one at a
            time.
        prefix: of the names of the files, which do not exist yet.
        holdings: what is written.
        file_bytes: the most that a file holds, without its header.

    Raises:
        CheckpointError: a dtype cannot be stored.
        OSError: the files cannot be written; those that were are removed.
    """
    return write_parts(folder, prefix, parts_of(holdings, file_bytes), file_bytes)


def write_parts(
    folder: AnyPath,
    prefix: str,
    parts: Iterable[WritablePart],
    file_bytes: int = FILE_BYTES,
    on_written: Callable[[int], Any] | None = None,
) -> WrittenFiles:
    """Write parts of tensors, none larger than ``file_bytes``; the rest is as of :func:`write_holdings`.

    Args:
        folder, prefix, file_bytes: see there.
        parts: each is loaded when it is written.
        on_written: called with the number of bytes of the tensors in each file, after it.
    """
    files = ((of_file, partial(_write_file, parts=of_file)) for of_file in by_file(parts, file_bytes))
    return write_files(folder, prefix, files, on_written)


def write_files(
    folder: AnyPath,
    prefix: str,
    files: Iterable[tuple[Sequence[WritablePart], Callable[[Path], FileEntry]]],
    on_written: Callable[[int], Any] | None = None,
) -> WrittenFiles:
    """Write files, of each of which is given what it holds and what writes it; see :func:`write_parts`.

    Raises:
        OSError: the files cannot be written; those that were are removed.
    """
    written = WrittenFiles({}, {})
    started: list[AnyPath] = []
    try:
        for number, (of_file, write) in enumerate(files):
            path = folder / f"{prefix}.{number:05d}.safetensors"
            started.append(path)
            written.files[path.name] = _put(path, write)
            for part in of_file:
                _note(written.tensors, part, path.name)
            if on_written is not None:
                on_written(sum(part.nbytes for part in of_file))
    except BaseException:
        remove(started)
        raise
    return written


def remove(paths: Iterable[AnyPath]) -> None:
    """Remove files that may exist, as far as that is possible."""
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError:
            continue  # the next save removes it


def _note(tensors: dict[str, TensorEntry], part: WritablePart, file: str) -> None:
    before = tensors[part.key].chunks if part.key in tensors else ()
    chunks = (*before, Chunk(part.box, file, part.name))
    tensors[part.key] = TensorEntry(stored_name(part.key, part.spec.dtype), part.spec.shape, chunks)


def by_file(parts: Iterable[WritablePart], file_bytes: int) -> Iterator[list[WritablePart]]:
    """What each file holds. Larger elements come first, so that all are aligned."""
    current: list[WritablePart] = []
    size = 0
    for part in sorted(parts, key=lambda part: -part.spec.dtype.itemsize):
        if current and size + part.nbytes > file_bytes:
            yield current
            current, size = [], 0
        current.append(part)
        size += part.nbytes
    if current:
        yield current


def parts_of(holdings: Iterable[Holding], file_bytes: int) -> Iterator[WritablePart]:
    """The parts of holdings, none larger than ``file_bytes``."""
    for holding in holdings:
        spec, number = StoredSpec(holding.dtype, holding.shape), 0
        for box, view in holding.parts:
            for small in split_box(box, file_bytes // spec.dtype.itemsize):
                inner = view[small.seen_from(box.start).slices] if small is not box else view
                yield WritablePart(holding.key, spec, small, f"{holding.key}#{number}", partial(_given, inner))
                number += 1


def header_of(parts: Sequence[WritablePart]) -> bytes:
    """The header of a file of parts.

    Raises:
        CheckpointError: a dtype cannot be stored.
    """
    for part in parts:
        stored_name(part.key, part.spec.dtype)  # by the tensor's name
    return header([(part.name, StoredSpec(part.spec.dtype, part.box.shape)) for part in parts])


def _given(view: Tensor) -> Tensor:
    return view


def _put(path: AnyPath, write: Callable[[Path], FileEntry]) -> FileEntry:
    """Write a file; a remote one in the folder for temporary files, and upload it."""
    if isinstance(path, Path):
        return write(path)
    with TemporaryDirectory(prefix="hybridpp-") as folder:
        local = Path(folder) / path.name
        entry = write(local)
        path.upload(local)
    return entry


def _write_file(path: Path, parts: Sequence[WritablePart]) -> FileEntry:
    digest, size = new_digest(), 0
    first = header_of(parts)
    with path.open("xb") as file:

        def write(data: memoryview) -> None:
            nonlocal size
            file.write(data)
            digest.update(data)
            size += data.nbytes

        write(memoryview(first))
        for part in parts:
            write(values(part.load(), part.spec.dtype))
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(size, written_as(digest))
