"""Read parts of tensors of a remote safetensors file: its header, then ranges of bytes."""

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from hybridpp.checkpoint.boxes import Box
from hybridpp.checkpoint.manifest import STORED_DTYPES
from hybridpp.checkpoint.remote_path import RemotePath
from hybridpp.checkpoint.safetensors_file import StoredHeader
from hybridpp.errors import CheckpointError

# Shorter runs of bytes are read with what lies between them.
_LEAST_RUN = 2**16
# What is read by one call.
_MOST_BYTES = 2**26


class WantedBox(NamedTuple):
    """A part of a stored tensor.

    Attributes:
        key: of the tensor in the file.
        dtype: torch's name.
        shape: of the stored tensor.
        box: the part.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    box: Box


class _Request(NamedTuple):
    """The bytes of a part: one range that covers it, or a range for each of its runs."""

    wanted: WantedBox
    ranges: list[tuple[int, int]]
    is_cover: bool


def read_boxes(path: RemotePath, wanted: Sequence[WantedBox]) -> Iterator[tuple[int, Tensor]]:
    """Yield parts of tensors with their numbers in ``wanted``.

    Raises:
        CheckpointError: the file is broken, or is not what was expected.
    """
    header = remote_header(path)
    batch: list[tuple[int, _Request]] = []
    size = 0
    for number, one in enumerate(wanted):
        request = _request(one, header.offset(one.key, one.dtype, one.shape))
        batch.append((number, request))
        size += sum(end - start for start, end in request.ranges)
        if size >= _MOST_BYTES:
            yield from _read(path, batch)
            batch, size = [], 0
    yield from _read(path, batch)


def remote_header(path: RemotePath) -> StoredHeader:
    """Where a file's tensors are.

    Raises:
        CheckpointError: it cannot be read, or is no safetensors file.
    """

    def read(start: int, end: int) -> bytes:
        (data,) = path.read_ranges([(start, end)])
        return data

    try:
        return StoredHeader(path, read)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read as a safetensors file: {error}") from error


def _request(wanted: WantedBox, start: int) -> _Request:
    shape, box = wanted.shape, wanted.box
    width = STORED_DTYPES[wanted.dtype][1]
    if not box.size:
        return _Request(wanted, [], False)
    inner = len(shape)
    while inner and box.shape[inner - 1] == shape[inner - 1]:
        inner -= 1
    # From dimension `inner` on the part has all; a range of the one before it is one run of bytes.
    outer = max(0, inner - 1)
    strides = [prod(shape[dim + 1 :]) * width for dim in range(len(shape))]
    run = prod(box.shape[outer:]) * width
    begin = start + sum(first * stride for first, stride in zip(box.start, strides, strict=True))
    begins = [begin]
    for dim in range(outer):
        begins = [each + step * strides[dim] for each in begins for step in range(box.shape[dim])]
    if len(begins) == 1 or run >= _LEAST_RUN:
        return _Request(wanted, [(each, each + run) for each in begins], False)
    return _Request(wanted, [(begins[0], begins[-1] + run)], True)


def _read(path: RemotePath, batch: Iterable[tuple[int, _Request]]) -> Iterator[tuple[int, Tensor]]:
    batch = list(batch)
    ranges = [one for _, request in batch for one in request.ranges]
    try:
        found = iter(path.read_ranges(ranges) if ranges else [])
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    for number, request in batch:
        data = bytearray().join([next(found) for _ in request.ranges])
        if len(data) != sum(end - start for start, end in request.ranges):
            raise CheckpointError(f"{path} is shorter than its header says")
        yield number, _tensor(request, data)


def _tensor(request: _Request, data: bytearray) -> Tensor:
    wanted = request.wanted
    dtype = getattr(torch, wanted.dtype)
    if not data:
        return torch.empty(wanted.box.shape, dtype=dtype)
    flat = torch.frombuffer(data, dtype=dtype)
    if not request.is_cover:
        return flat.view(wanted.box.shape)
    strides = [prod(wanted.shape[dim + 1 :]) for dim in range(len(wanted.shape))]
    return flat.as_strided(wanted.box.shape, strides)
