"""The manifest of a checkpoint: what it consists of. Without one that is intact, a folder is no checkpoint.

It is JSON. The first line holds a digest of the rest, so that a changed bit is found. All that is read from it is
checked: names of files against a pattern, boxes against shapes, sizes against files.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from hybridpp.checkpoint.boxes import Box
from hybridpp.checkpoint.digest import bytes_match, new_digest, written_as
from hybridpp.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
DATA_FILE = re.compile(r"rank-\d{5,}\.[0-9a-f]{8}\.\d{5}\.safetensors", re.ASCII)
"""Names of data files: of which rank, of which save, and a number."""

_FIRST_LINE = re.compile(rb'\{"digest": "([a-z0-9_]+:[0-9a-f]+)",')
_SAVE_ID = re.compile(r"[0-9a-f]{8}", re.ASCII)
# Name in safetensors files, and bytes of an element, by torch's name.
STORED_DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "complex64": ("C64", 8),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}


class NewerFormatError(CheckpointError):
    """A checkpoint that is not damaged, but of a newer version: an older one beside it is not meant instead."""


class Chunk(NamedTuple):
    """A box of a tensor in a file.

    Attributes:
        box: which part of the tensor.
        file: name of the file in the checkpoint's folder.
        key: of the part in the file.
    """

    box: Box
    file: str
    key: str


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a checkpoint.

    Attributes:
        dtype: torch's name, as ``"float32"``.
        shape: of the full tensor.
        chunks: disjoint boxes, together all of it.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * STORED_DTYPES[self.dtype][1]


class FileEntry(NamedTuple):
    """A data file.

    Attributes:
        nbytes: its size.
        digest: of its bytes, with the algorithm.
    """

    nbytes: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        save_id: of the save that wrote it.
        step: of the run.
        layout: that the run had, for people.
        files: by name.
        tensors: by key.
        state: everything else, as JSON.
    """

    save_id: str
    step: int
    layout: Mapping[str, Any]
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]
    state: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all data files."""
        return sum(file.nbytes for file in self.files.values())

    def to_bytes(self) -> bytes:
        """The text of the manifest."""
        content = {
            "format": FORMAT,
            "save_id": self.save_id,
            "step": self.step,
            "layout": self.layout,
            "files": {name: {"bytes": file.nbytes, "digest": file.digest} for name, file in self.files.items()},
            "tensors": {key: tensor_as_json(entry) for key, entry in self.tensors.items()},
            "state": self.state,
        }
        rest = json.dumps(content, allow_nan=False).encode()[1:] + b"\n"
        digest = new_digest()
        digest.update(rest)
        return f'{{"digest": "{written_as(digest)}",\n'.encode() + rest


def tensor_as_json(entry: TensorEntry) -> dict[str, Any]:
    """An entry as JSON can hold it."""
    chunks = [[list(box.start), list(box.shape), file, key] for box, file, key in entry.chunks]
    return {"dtype": entry.dtype, "shape": list(entry.shape), "chunks": chunks}


def merged(entries: Iterable[tuple[str, Any]]) -> dict[str, TensorEntry]:
    """The tensors of a checkpoint, from what each rank wrote of them as JSON."""
    found: dict[str, TensorEntry] = {}
    for key, raw in entries:
        entry = _tensor(raw)
        if key in found:
            known = found[key]
            _require((known.dtype, known.shape) == (entry.dtype, entry.shape), f"ranks disagree about {key!r}")
            entry = replace(entry, chunks=(*known.chunks, *entry.chunks))
        found[key] = entry
    return found


def parse(data: bytes) -> Manifest:
    """Read a manifest.

    Raises:
        NewerFormatError: a newer version wrote it.
        CheckpointError: it is damaged, or names what it must not name.
    """
    first, _, rest = data.partition(b"\n")
    found = _FIRST_LINE.fullmatch(first)
    if found is None or not bytes_match(found[1].decode(), rest):
        raise CheckpointError(f"{MANIFEST} is damaged: it does not have the digest that it was written with")
    try:
        content = json.loads(b"{" + rest)
        _check_format(content["format"])
        manifest = Manifest(
            save_id=_typed(content["save_id"], str),
            step=_count(content["step"]),
            layout=_typed(content["layout"], dict),
            files={name: _file(name, entry) for name, entry in content["files"].items()},
            tensors={key: _tensor(entry) for key, entry in content["tensors"].items()},
            state=_typed(content["state"], dict),
        )
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} is not one of this library: {type(error).__name__}: {error}") from error
    check(manifest)
    return manifest


def _check_format(number: Any) -> None:
    if type(number) is int and number > FORMAT:
        raise NewerFormatError(
            f"a newer version of hybridpp wrote it, in format {number}, and this one reads format {FORMAT}. Install "
            "that version"
        )
    _require(number == FORMAT, f"format is {number!r}, and this version reads {FORMAT}")


def check(manifest: Manifest) -> None:
    """Check that the boxes of each tensor are all of it, and fit in its files.

    Raises:
        CheckpointError: they do not.
    """
    _require(_SAVE_ID.fullmatch(manifest.save_id) is not None, f"save_id is {manifest.save_id!r}")
    sizes = dict.fromkeys(manifest.files, 8)
    keys = set[tuple[str, str]]()
    for key, entry in manifest.tensors.items():
        for box, file, name in entry.chunks:
            _require(file in manifest.files, f"{key!r} is in a file that is not listed")
            _require((file, name) not in keys, f"{name!r} is listed twice")
            _require(_lies_in(box, entry.shape), f"a part of {key!r} does not lie in its shape")
            keys.add((file, name))
            sizes[file] += box.size * STORED_DTYPES[entry.dtype][1]
        _require(sum(chunk.box.size for chunk in entry.chunks) == prod(entry.shape), f"parts of {key!r} are missing")
        _require(_are_disjoint([chunk.box for chunk in entry.chunks]), f"parts of {key!r} overlap")
    for name, size in sizes.items():
        _require(size <= manifest.files[name].nbytes, f"{name} is too small for what it holds")


def _lies_in(box: Box, shape: tuple[int, ...]) -> bool:
    return len(box.start) == len(box.shape) == len(shape) and all(
        start + length <= size for start, length, size in zip(*box, shape, strict=True)
    )


def _are_disjoint(boxes: list[Box]) -> bool:
    """Whether no two boxes have an element in common; those that lie apart along dimension 0 are not compared."""
    ordered = sorted(boxes)
    for index, box in enumerate(ordered):
        end = box.start[0] + box.shape[0] if box.start else 1
        for other in ordered[index + 1 :]:
            if other.start and other.start[0] >= end:
                break
            if box.intersection(other) is not None:
                return False
    return True


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise CheckpointError(f"{MANIFEST} is wrong: {problem}")


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} is no number of anything")
    return value


def _file(name: str, entry: Any) -> FileEntry:
    if DATA_FILE.fullmatch(name) is None:
        raise ValueError(f"{name!r} is no name of a data file")
    return FileEntry(_count(entry["bytes"]), _typed(entry["digest"], str))


def _tensor(entry: Any) -> TensorEntry:
    dtype = _typed(entry["dtype"], str)
    if dtype not in STORED_DTYPES:
        raise ValueError(f"{dtype!r} is no dtype of a checkpoint")
    chunks = [
        Chunk(Box(_counts(start), _counts(shape)), _typed(file, str), _typed(key, str))
        for start, shape, file, key in entry["chunks"]
    ]
    return TensorEntry(dtype, _counts(entry["shape"]), tuple(chunks))


def _counts(values: Any) -> tuple[int, ...]:
    return tuple(map(_count, values))
