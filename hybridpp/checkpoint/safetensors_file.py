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
from hybridpp.checkpoint.schema import integer, items, mapping, one_of, record, require, shape_of, text
from hybridpp.errors import CheckpointError
from hybridpp.strict_json import parse_strictly

_MOST_HEADER = 10**8
_ENTRY = record(
    {
        "dtype": one_of([stored for stored, _ in STORED_DTYPES.values()]),
        "shape": items(integer()),
        "data_offsets": items(integer(), exactly=2),
    }
)
_WIDTHS = dict(STORED_DTYPES.values())


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
            self._entries = parse_strictly(read(8, 8 + num_bytes))
            mapping(mapping(lambda value, where: None))(self._entries, "its header")
            mapping(text())(self._entries.pop("__metadata__", {}), "its metadata")
            for key, entry in self._entries.items():
                _check_entry(key, entry)
        except ValueError as error:
            raise CheckpointError(f"{path} cannot be read as a safetensors file: {error}") from error
        self._data = 8 + num_bytes

    def check_parts(self, parts: Mapping[str, tuple[str, tuple[int, ...]]], nbytes: int) -> None:
        """Check that the file holds some tensors, one after the other, and nothing else.

        Args:
            parts: their dtypes, by torch's name, and shapes.
            nbytes: size of the file.

        Raises:
            CheckpointError: it does not.
        """
        for key, (dtype, shape) in parts.items():
            self.offset(key, dtype, shape)
        if others := self._entries.keys() - parts.keys():
            raise CheckpointError(f"{self._path} is not what its manifest says: it holds {min(others)!r:.120}, too")
        end = 0
        for start, stop in sorted(entry["data_offsets"] for entry in self._entries.values()):
            if start != end:
                raise CheckpointError(f"{self._path} is broken: of its data, a part begins at {start}, not at {end}")
            end = stop
        if self._data + end != nbytes:
            raise CheckpointError(
                f"{self._path} is broken: it has {nbytes} bytes, and its header says {self._data + end}"
            )

    def offset(self, key: str, dtype: str, shape: tuple[int, ...]) -> int:
        """Where a tensor's values begin in the file.

        Args:
            key: of the tensor.
            dtype: torch's name of the one that is expected.
            shape: that is expected.

        Raises:
            CheckpointError: there is no such tensor.
        """
        name, _ = STORED_DTYPES[dtype]
        found = "is missing"
        if key in self._entries:
            entry = self._entries[key]
            found = f"has shape {tuple(entry['shape'])} and {entry['dtype']}"
            if (entry["dtype"], entry["shape"]) == (name, list(shape)):
                start: int = entry["data_offsets"][0]
                return self._data + start
        raise CheckpointError(
            f"{self._path} is not what its manifest says: {key} {found}, and should have shape {shape} and {name}."
        )


def _check_entry(key: str, entry: Any) -> None:
    where = f"its entry {key!r:.120}"
    _ENTRY(entry, where)
    width = _WIDTHS[entry["dtype"]]
    size = prod(shape_of(entry["shape"], f"{where}.shape", width)) * width
    start, end = entry["data_offsets"]
    require(end - start == size, f"{where}.data_offsets", [start, end], f"{size} bytes apart")


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
