"""Write safetensors files tensor by tensor: safetensors' own function needs all of them in memory."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridpp.checkpoint.manifest import STORED_DTYPES
from hybridpp.errors import CheckpointError


class StoredSpec(NamedTuple):
    """A tensor without its values.

    Attributes:
        dtype: of its elements.
        shape: of all of it.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "StoredSpec":
        """That of a tensor."""
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize


def stored_name(name: str, dtype: torch.dtype) -> str:
    """A dtype as checkpoints name it, of a tensor called ``name``.

    Raises:
        CheckpointError: safetensors files cannot hold it.
    """
    found = str(dtype).removeprefix("torch.")
    if found not in STORED_DTYPES:
        raise CheckpointError(
            f"{name} has dtype {found}, which safetensors files cannot hold. Convert it to another dtype."
        )
    return found


def header(specs: Sequence[tuple[str, StoredSpec]], metadata: Mapping[str, str] | None = None) -> bytes:
    """The header of a file: its length in 8 bytes, and JSON, padded so that what follows is aligned.

    Args:
        specs: the tensors in the order in which their values follow; larger elements first, so that all are aligned.
        metadata: of the file.

    Raises:
        CheckpointError: see :func:`stored_name`.
    """
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, spec in specs:
        start, end = end, end + spec.nbytes
        dtype, _ = STORED_DTYPES[stored_name(name, spec.dtype)]
        entries[name] = {"dtype": dtype, "shape": list(spec.shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def values(tensor: Tensor, dtype: torch.dtype) -> memoryview:
    """The bytes of a tensor, converted to a dtype; of one that is in host memory and contiguous, without a copy."""
    host = tensor.detach().to(device="cpu", dtype=dtype).contiguous()
    return host.reshape(-1).view(torch.uint8).numpy().data


def write_safetensors(
    path: Path, specs: Mapping[str, StoredSpec], tensors: Iterable[Tensor], written: Callable[[int], Any] | None = None
) -> None:
    """Write a file that does not exist or is empty, and sync it. One tensor is taken at a time.

    Args:
        path: of the file.
        specs: by name, as :func:`header` wants them.
        tensors: in that order.
        written: called with the number of bytes of each, after it.

    Raises:
        CheckpointError: see :func:`stored_name`; or a tensor is not what its spec says.
        OSError: the file cannot be written.
    """
    with path.open("wb") as file:
        file.write(header(list(specs.items()), {"format": "pt"}))
        for (name, spec), tensor in zip(specs.items(), tensors, strict=True):
            if tuple(tensor.shape) != spec.shape:
                raise CheckpointError(f"{name} has shape {tuple(tensor.shape)}, and {spec.shape} was expected")
            file.write(values(tensor, spec.dtype))
            if written is not None:
                written(spec.nbytes)
        file.flush()
        os.fsync(file.fileno())
