"""Files of a checkpoint in host memory, to be written while the run goes on."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hybridpp.checkpoint.digest import new_digest, written_as
from hybridpp.checkpoint.direct_write import Pages, write_pages
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
        pages: all of its bytes.
    """

    parts: Sequence[WritablePart]
    pages: Pages


def file_images(holdings: Iterable[Holding], file_bytes: int = FILE_BYTES) -> list[FileImage]:
    """Copies of tensors in host memory, as :func:`~hybridpp.checkpoint.writer.write_holdings` would write them.

    Raises:
        CheckpointError: a dtype cannot be stored.
    """
    return [_image(parts) for parts in by_file(parts_of(holdings, file_bytes), file_bytes)]


def _image(parts: Sequence[WritablePart]) -> FileImage:
    header = header_of(parts)
    size = len(header) + sum(part.nbytes for part in parts)
    pages = Pages(size)
    image = pages.tensor
    image[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    end = len(header)
    for part in parts:
        start, end = end, end + part.nbytes
        image[start:end].view(part.spec.dtype).view(part.box.shape).copy_(part.load().detach())
    return FileImage([part._replace(load=_nothing) for part in parts], pages)


def _nothing() -> Tensor:
    return torch.empty(0)


def write_images(
    folder: AnyPath, prefix: str, images: Iterable[FileImage], after_block: Callable[[], None] = lambda: None
) -> WrittenFiles:
    """Write files of which all bytes are in host memory, with little time of the processor, and free that memory.

    Where the file system allows it, the device reads that memory itself, past the cache of files.

    Args:
        folder, prefix: see :func:`~hybridpp.checkpoint.writer.write_holdings`.
        images: what is written; what they hold is undefined afterwards.
        after_block: called each time that a few megabytes are written.

    Raises:
        OSError: the files cannot be written; those that were are removed.
    """
    write = partial(_write_image, after_block=after_block)
    return write_files(folder, prefix, ((image.parts, partial(write, image=image)) for image in images))


def _write_image(path: Path, image: FileImage, after_block: Callable[[], None]) -> FileEntry:
    digest = new_digest()
    write_pages(path, image.pages, digest.update, after_block)
    return FileEntry(image.pages.size, written_as(digest))
