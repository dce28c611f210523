"""Read parts of tensors of a local safetensors file into tensors, without a copy in between where that is possible."""

from collections.abc import Iterable
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from hybridpp.checkpoint.boxes import Box
from hybridpp.checkpoint.find_tensors import opened
from hybridpp.checkpoint.ranged_file import WantedBox
from hybridpp.checkpoint.safetensors_file import StoredHeader
from hybridpp.errors import CheckpointError


def fill_from(path: Path, wanted: Iterable[tuple[WantedBox, Tensor]]) -> None:
    """Read parts of tensors, each into a tensor of its shape; values are converted to the dtypes of their targets.

    A part that lies in one piece in the file and in memory is read to its place. Others are copied from the file as it
    is mapped to memory.

    Raises:
        CheckpointError: the file is broken, or is not what was expected.
    """
    try:
        with path.open("rb", buffering=0) as file, ExitStack() as stack:
            mapped: Any = None
            header = _header_in(path, file)
            for one, target in wanted:
                offset = header.offset(one.key, one.dtype, one.shape)
                if _is_one_piece(one.shape, one.box) and _holds_bytes(target, one.dtype):
                    _read_into(path, file, offset + _first(one) * target.itemsize, target)
                    continue
                mapped = mapped or stack.enter_context(opened(path))
                target.copy_(_mapped(mapped, one))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def local_header(path: Path) -> StoredHeader:
    """Where a file's tensors are.

    Raises:
        CheckpointError: it is no safetensors file.
        OSError: it cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        return _header_in(path, file)


def _header_in(path: Path, file: BinaryIO) -> StoredHeader:
    return StoredHeader(path, lambda start, end: _bytes(file, start, end))


def _bytes(file: BinaryIO, start: int, end: int) -> bytes:
    """A part of a file, or what there is of it: a file without a buffer may give less at a time than it has."""
    file.seek(start)
    data = b""
    while more := file.read(end - start - len(data)):
        data += more
    return data


def _is_one_piece(shape: tuple[int, ...], box: Box) -> bool:
    """Whether a part of a tensor is one run of its elements."""
    inner = len(shape)
    while inner and box.shape[inner - 1] == shape[inner - 1]:
        inner -= 1
    return prod(box.shape[: max(0, inner - 1)]) == 1


def _first(wanted: WantedBox) -> int:
    """The number of a part's first element."""
    return sum(start * prod(wanted.shape[dim + 1 :]) for dim, start in enumerate(wanted.box.start))


def _holds_bytes(target: Tensor, dtype: str) -> bool:
    """Whether a tensor's memory is what a file has of one of a dtype."""
    return target.is_contiguous() and target.device.type == "cpu" and str(target.dtype) == f"torch.{dtype}"


def _read_into(path: Path, file: BinaryIO, offset: int, target: Tensor) -> None:
    if not target.numel():
        return
    memory = target.detach().reshape(-1).view(torch.uint8).numpy().data
    file.seek(offset)
    done = 0
    while done < memory.nbytes:
        count = file.readinto(memory[done:])  # type: ignore[attr-defined]  # an unbuffered file has it
        if not count:
            raise CheckpointError(f"{path} is shorter than its header says")
        done += count
    torch.autograd.graph.increment_version(target)  # as a copy does


def _mapped(handle: Any, wanted: WantedBox) -> Tensor:
    part: Tensor = handle.get_slice(wanted.key)[wanted.box.slices] if wanted.shape else handle.get_tensor(wanted.key)
    return part
