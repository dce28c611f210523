"""Read what a rank needs of a checkpoint, into its own tensors: only the boxes that it holds."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from hybridpp.checkpoint.boxes import Box
from hybridpp.checkpoint.digest import file_matches
from hybridpp.checkpoint.local_file import fill_from, local_header
from hybridpp.checkpoint.manifest import MANIFEST, MOST_BYTES, Chunk, Manifest, TensorEntry, parse
from hybridpp.checkpoint.ranged_file import WantedBox, read_boxes, remote_header
from hybridpp.checkpoint.remote_path import AnyPath, RemotePath
from hybridpp.checkpoint.schema import read_limited
from hybridpp.checkpoint.writer import Holding
from hybridpp.errors import CheckpointError


class PlannedRead(NamedTuple):
    """A part of a chunk, and where its values go.

    Attributes:
        chunk: in a file.
        dtype: of the chunk.
        source: what of the chunk is read.
        target: a view of that shape.
    """

    chunk: Chunk
    dtype: str
    source: Box
    target: Tensor


def read_manifest(folder: AnyPath) -> Manifest:
    """The manifest of a checkpoint whose files have the right sizes; their contents are not read.

    Raises:
        CheckpointError: it is damaged, or a file is missing or has another size.
    """
    try:
        manifest = parse(read_limited(folder / MANIFEST, MOST_BYTES))
    except OSError as error:
        raise CheckpointError(f"{MANIFEST} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{MANIFEST} is wrong: {error}") from error
    for name, file in manifest.files.items():
        try:
            _check_size(folder / name, file.nbytes)
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read: {error.strerror}") from error
    return manifest


def _check_size(path: AnyPath, nbytes: int) -> None:
    if path.is_symlink():
        raise CheckpointError(f"{path.name} is a link, and not the file that was written")
    if not path.is_file():
        raise CheckpointError(f"{path.name} is missing")
    if (size := path.stat().st_size) != nbytes:
        raise CheckpointError(f"{path.name} has {size} bytes, and was written with {nbytes}")


def verify_file(folder: AnyPath, manifest: Manifest, name: str) -> None:
    """Read a data file, and compare it with its digest, and its header with the manifest.

    Raises:
        CheckpointError: it was changed, or cannot be read.
    """
    try:
        matches = file_matches(manifest.files[name].digest, folder / name)
        if not matches:
            raise CheckpointError(f"{name} is damaged: it does not have the digest that it was written with")
        parts, nbytes = manifest.stored_parts[name], manifest.files[name].nbytes
        path = folder / name
        header = remote_header(path) if isinstance(path, RemotePath) else local_header(path)
        header.check_parts(parts, nbytes)
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error.strerror}") from error


def plan_reads(tensors: Mapping[str, TensorEntry], holdings: Iterable[Holding]) -> list[PlannedRead]:
    """What is read to fill all parts of holdings; nothing is read yet.

    Raises:
        CheckpointError: a tensor is missing, or has another shape.
    """
    reads: list[PlannedRead] = []
    for holding in holdings:
        entry = tensors.get(holding.key)
        if entry is None:
            raise CheckpointError(f"{holding.key} is missing")
        if entry.shape != holding.shape:
            raise CheckpointError(f"{holding.key} has shape {entry.shape} in the checkpoint, and {holding.shape} here")
        for box, view in holding.parts:
            found = [(chunk, common) for chunk in entry.chunks if (common := chunk.box.intersection(box)) is not None]
            assert sum(common.size for _, common in found) == prod(box.shape), "chunks are all of the tensor"
            reads += [
                PlannedRead(
                    chunk, entry.dtype, common.seen_from(chunk.box.start), view[common.seen_from(box.start).slices]
                )
                for chunk, common in found
            ]
    return reads


@torch.no_grad()
def fill(folder: AnyPath, reads: Sequence[PlannedRead]) -> None:
    """Read, file by file; values are converted to the dtypes of their targets.

    Raises:
        CheckpointError: a file is broken, or is not what the manifest says.
    """
    by_file: dict[str, list[PlannedRead]] = {}
    for read in reads:
        by_file.setdefault(read.chunk.file, []).append(read)
    for name, wanted in by_file.items():
        boxes = [WantedBox(read.chunk.key, read.dtype, read.chunk.box.shape, read.source) for read in wanted]
        targets = [read.target for read in wanted]
        if isinstance(folder, RemotePath):
            for number, part in read_boxes(folder / name, boxes):
                targets[number].copy_(part)
        else:
            fill_from(folder / name, zip(boxes, targets, strict=True))
