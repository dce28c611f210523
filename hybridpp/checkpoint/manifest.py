"""The manifest of a checkpoint: what it consists of. Without one that is intact, a folder is no checkpoint.

It is JSON. The first line holds a digest of the rest, so that a changed bit is found. A digest that fits does not say
who wrote it, so all of it is checked before any of it is used: names of files against a pattern, boxes against shapes,
sizes against files, the state against what saves write.
"""

import gc
import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, NoReturn

from hybridpp.checkpoint.boxes import Box, full_box
from hybridpp.checkpoint.digest import bytes_match, new_digest, written_as
from hybridpp.checkpoint.schema import (
    anything,
    integer,
    is_shape,
    items,
    mapping,
    one_of,
    optional,
    record,
    shape_of,
    text,
)
from hybridpp.checkpoint.state_schema import check_state
from hybridpp.errors import CheckpointError
from hybridpp.sizes import format_bytes
from hybridpp.strict_json import parse_strictly

FORMAT = 1
MANIFEST = "manifest.json"
MOST_BYTES = 2**29
"""Of a manifest: the states of generators of 16,000 ranks take half of it."""
DATA_FILE = re.compile(r"rank-\d{5,}\.[0-9a-f]{8}\.\d{5}\.safetensors", re.ASCII)
"""Names of data files: of which rank, of which save, and a number."""

_FIRST_LINE = re.compile(rb'\{"digest": "([a-z0-9_]+:[0-9a-f]+)",')
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


_TEXT = text()
_NAME = text(DATA_FILE.pattern, "the name of a data file")
_CHUNK = items(anything, exactly=4)
_TENSOR = record({"dtype": one_of(STORED_DTYPES), "shape": anything, "chunks": items(_CHUNK)})
_CONTENT = record(
    {
        "save_id": text("[0-9a-f]{8}", "eight hexadecimal digits"),
        "step": integer(),
        "files": mapping(record({"bytes": integer(), "digest": text("[a-z0-9_]+:[0-9a-f]+", "a digest")})),
        "tensors": mapping(anything),
        "layout": anything,
        "state": anything,
    },
    {"saved": optional(integer(0, 2**40))},
    is_open=True,
)
# A prime, so that a sum of products of random numbers below it is zero by chance alone.
_PRIME = 2**61 - 1


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
        saved_at: when, in seconds since 1970; None: a version that wrote no time saved it.
    """

    save_id: str
    step: int
    layout: Mapping[str, Any]
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]
    state: Mapping[str, Any]
    saved_at: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all data files."""
        return sum(file.nbytes for file in self.files.values())

    @cached_property
    def stored_parts(self) -> dict[str, dict[str, tuple[str, tuple[int, ...]]]]:
        """By file and by name in it, the dtype and shape of each part."""
        found: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {name: {} for name in self.files}
        for entry in self.tensors.values():
            for box, file, name in entry.chunks:
                found[file][name] = (entry.dtype, box.shape)
        return found

    def to_bytes(self) -> bytes:
        """The text of the manifest.

        Raises:
            CheckpointError: it is larger than what is read.
        """
        content = {
            "format": FORMAT,
            "save_id": self.save_id,
            "step": self.step,
            "saved": self.saved_at,
            "layout": self.layout,
            "files": {name: {"bytes": file.nbytes, "digest": file.digest} for name, file in self.files.items()},
            "tensors": {key: tensor_as_json(entry) for key, entry in self.tensors.items()},
            "state": self.state,
        }
        rest = json.dumps(content, allow_nan=False).encode()[1:] + b"\n"
        if len(rest) > MOST_BYTES - 200:
            raise CheckpointError(
                f"what is saved beside tensors takes {format_bytes(len(rest))}, and {MANIFEST} holds at most "
                f"{format_bytes(MOST_BYTES)}. Save large tensors of extras and of get_extra_state in files of your own."
            )
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
        entry = _tensor(key, raw)
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
        CheckpointError: it is damaged, or holds what no save writes.
    """
    first, _, rest = data.partition(b"\n")
    found = _FIRST_LINE.fullmatch(first)
    if found is None or not bytes_match(found[1].decode(), rest):
        raise CheckpointError(f"{MANIFEST} is damaged: it does not have the digest that it was written with")
    try:
        with _no_collections():
            return _parsed(rest)
    except ValueError as error:
        raise CheckpointError(f"{MANIFEST} is wrong: {error}") from error


@contextmanager
def _no_collections() -> Iterator[None]:
    """Inside, Python looks for no cycles of objects: for the millions of a large manifest it takes half of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _parsed(rest: bytes) -> Manifest:
    content = parse_strictly(b"{" + rest)
    _check_format(content.get("format") if isinstance(content, dict) else None)
    _CONTENT(content, "")
    manifest = Manifest(
        save_id=content["save_id"],
        step=content["step"],
        layout=content["layout"],
        files={name: FileEntry(entry["bytes"], entry["digest"]) for name, entry in content["files"].items()},
        tensors={key: _tensor(key, entry) for key, entry in content["tensors"].items()},
        state=content["state"],
        saved_at=content.get("saved"),
    )
    check(manifest)
    check_state(manifest.state, manifest.layout, manifest.tensors)
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
    for name in manifest.files:
        _require(DATA_FILE.fullmatch(name) is not None, f"{name!r:.80} is no name of a data file")
    sizes = dict.fromkeys(manifest.files, 8)
    keys = set[tuple[str, str]]()
    for key, entry in manifest.tensors.items():
        prefix, width = f"{key}#", STORED_DTYPES[entry.dtype][1]
        for box, file, name in entry.chunks:
            number = name.removeprefix(prefix)
            if (
                file not in sizes
                or (file, name) in keys
                or not (number.isdecimal() and number != name)
                or not _lies_in(box, entry.shape)
            ):
                _refuse_part(key, entry, Chunk(box, file, name), is_listed=file in sizes)
            keys.add((file, name))
            sizes[file] += box.size * width
        _check_parts(key, entry)
    for name, size in sizes.items():
        nbytes = manifest.files[name].nbytes
        _require(size <= nbytes, f"{name} is too small for what it holds: {nbytes} bytes for {size}")


def _refuse_part(key: str, entry: TensorEntry, chunk: Chunk, *, is_listed: bool) -> NoReturn:
    """Say what is wrong with a part, whose text is not made for those that are right: there may be a million."""
    box, file, name = chunk
    number = name.removeprefix(f"{key}#")
    _require(is_listed, f"{key!r:.120} is in a file that is not listed: {file!r:.80}")
    _require(_lies_in(box, entry.shape), f"a part of {key!r:.120} does not lie in its shape {entry.shape}")
    is_name = number.isdecimal() and number != name
    _require(is_name, f"{name!r:.120} is no name of a part of {key!r:.120}")
    raise CheckpointError(f"{MANIFEST} is wrong: {name!r:.120} is listed twice")


def _check_parts(key: str, entry: TensorEntry) -> None:
    boxes, size = [chunk.box for chunk in entry.chunks], prod(entry.shape)
    if boxes == [full_box(entry.shape)]:  # as most are
        return
    total = sum(box.size for box in boxes)
    _require(total >= size, f"parts of {key!r:.120} are missing: it has {total} of {size} elements")
    _require(total <= size and _are_all_of(boxes, entry.shape), f"parts of {key!r:.120} overlap")


def _lies_in(box: Box, shape: tuple[int, ...]) -> bool:
    return len(box.start) == len(box.shape) == len(shape) and all(
        start + length <= size for start, length, size in zip(*box, shape, strict=True)
    )


def _are_all_of(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Whether boxes are all of a shape, with each element in one of them.

    Each position at which boxes begin or end gets a random number, and a range weighs the difference of those at its
    ends; a box weighs the product over its ranges. If each element is in one box, the weights add up to that of the
    shape. Otherwise the two differ by a polynomial in the random numbers, which is zero for one of 2**55 draws. So the
    time is linear in the number of boxes; to compare all pairs takes its square.
    """
    draw = random.Random()  # no seed: whoever wrote the boxes does not know it
    numbers: list[dict[int, int]] = [{} for _ in shape]

    def weight(box: Box) -> int:
        product = 1
        for at, start, length in zip(numbers, box.start, box.shape, strict=True):
            for end in (start, start + length):
                if end not in at:
                    at[end] = draw.randrange(_PRIME)
            product = product * (at[start + length] - at[start]) % _PRIME
        return product

    return sum(map(weight, boxes)) % _PRIME == weight(full_box(shape))


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise CheckpointError(f"{MANIFEST} is wrong: {problem}")


def _tensor(key: str, entry: Any) -> TensorEntry:
    where = f"the tensor {key!r:.120}"
    _TENSOR(entry, where)
    dtype = entry["dtype"]
    width = STORED_DTYPES[dtype][1]
    chunks = []
    for number, chunk in enumerate(entry["chunks"]):
        start, shape, file, name = chunk
        is_right = is_shape(start, 1) and is_shape(shape, width) and _is_file(file) and isinstance(name, str)
        if not is_right:
            _refuse_chunk(chunk, f"part {number} of {where}", width)
        chunks.append(Chunk(Box(tuple(start), tuple(shape)), file, name))
    return TensorEntry(dtype, shape_of(entry["shape"], f"the shape of {where}", width), tuple(chunks))


def _is_file(name: Any) -> bool:
    return isinstance(name, str) and DATA_FILE.fullmatch(name) is not None


def _refuse_chunk(chunk: Sequence[Any], at: str, width: int) -> None:
    start, shape, file, name = chunk
    shape_of(start, f"{at}: its start", 1)
    shape_of(shape, f"{at}: its shape", width)
    _NAME(file, f"{at}: its file")
    _TEXT(name, f"{at}: its name")
