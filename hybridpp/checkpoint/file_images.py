"""Files of a checkpoint in host memory, to be written while the run goes on."""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hybridpp.checkpoint.digest import new_digest, written_as
from hybridpp.checkpoint.direct_write import pages, write_pages
from hybridpp.checkpoint.manifest import FileEntry
from hybridpp.checkpoint.remote_path import AnyPath
from hybridpp.checkpoint.writer import (
    FILE_BYTES,
    Holding,
    WritablePart,
    WrittenFiles,
    by_file,
    header_of,
    parts_of,
    write_files,
)


class FileImage(NamedTuple):
    """A file that is to be written.

    Attributes:
        parts: what it holds; they refer to no tensors of the run.
        data: all of its bytes, at the start of a page of memory, and zeros up to the end of one.
        size: of the file.
    """

    parts: Sequence[WritablePart]
    data: Tensor
    size: int


def file_images(holdings: Iterable[Holding], file_bytes: int = FILE_BYTES) -> list[FileImage]:
    """Copies of tensors in host memory, as :func:`~hybridpp.checkpoint.writer.write_holdings` would write them.

    Raises:
        CheckpointError: a dtype cannot be stored.
    """
    return [_image(parts) for parts in by_file(parts_of(holdings, file_bytes), file_bytes)]


def _image(parts: Sequence[WritablePart]) -> FileImage:
    header = header_of(parts)
    size = len(header) + sum(part.nbytes for part in parts)
    image = pages(size)
    image[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    end = len(header)
    for part in parts:
        start, end = end, end + part.nbytes
        image[start:end].view(part.spec.dtype).view(part.box.shape).copy_(part.load().detach())
    return FileImage([part._replace(load=_nothing) for part in parts], image, size)


def _nothing() -> Tensor:
    return torch.empty(0)


def write_images(folder: AnyPath, prefix: str, images: Iterable[FileImage]) -> WrittenFiles:
    """Write files of which all bytes are in host memory, with little time of the processor.

    Where the file system allows it, the device reads that memory itself, past the cache of files.

    Raises:
        OSError: the files cannot be written; those that were are removed.
    """
    return write_files(folder, prefix, ((image.parts, partial(_write_image, image=image)) for image in images))


def _write_image(path: Path, image: FileImage) -> FileEntry:
    digest = new_digest()
    digest.update(image.data.numpy().data[: image.size])
    write_pages(path, image.data, image.size)
    return FileEntry(image.size, written_as(digest))
