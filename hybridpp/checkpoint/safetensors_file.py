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
from hybridpp.checkpoint.remote_path import AnyPath
from hybridpp.errors import CheckpointError

_MOST_HEADER = 10**8


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


class StoredHeader:
    """Where the tensors of a file are.

    Args:
        path: of the file, for errors.
        read: gives bytes of the file from a start to an end, or fewer at its end.

    Raises:
        CheckpointError: it is no safetensors file.
        OSError: it cannot be read.
    """

    def __init__(self, path: AnyPath, read: Callable[[int, int], bytes]):
        self._path = path
        try:
            length = read(0, 8)
            num_bytes = int.from_bytes(length, "little")
            if len(length) != 8 or num_bytes > _MOST_HEADER:
                raise ValueError("it has no header")
            self._entries = json.loads(read(8, 8 + num_bytes))
            if not isinstance(self._entries, dict):
                raise ValueError("its header is no dict")
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be read as a safetensors file: {error}") from error
        self._data = 8 + num_bytes

    def offset(self, key: str, dtype: str, shape: tuple[int, ...]) -> int:
        """Where a tensor's values begin in the file.

        Args:
            key: of the tensor.
            dtype: torch's name of the one that is expected.
            shape: that is expected.

        Raises:
            CheckpointError: there is no such tensor.
        """
        name, width = STORED_DTYPES[dtype]
        found = "is missing"
        try:
            if key in self._entries:
                entry = self._entries[key]
                found = f"has shape {tuple(entry['shape'])} and {entry['dtype']}"
                start, end = entry["data_offsets"]
                fits = (entry["dtype"], entry["shape"]) == (name, list(shape))
                if fits and type(start) is int and start >= 0 and end - start == prod(shape) * width:
                    return self._data + start
        except (KeyError, TypeError, ValueError) as error:
            found = f"has a broken entry: {type(error).__name__}: {error}"
        raise CheckpointError(
            f"{self._path} is not what its manifest says: {key} {found}, and should have shape {shape} and {name}."
        )


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
