"""Digests of the files of checkpoints: xxh3 where it is installed, several times faster than what Python has."""

import hashlib
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from hybridpp.checkpoint.remote_path import AnyPath
from hybridpp.errors import CheckpointError

try:
    import xxhash
except ImportError:  # on a host with torch and transformers alone
    xxhash = None  # type: ignore[assignment]  # there is no other name for a package that is missing

# What is hashed is still in the processor's cache then.
_BLOCK = 2**20


class Digest(Protocol):
    """A digest that is being computed, as in ``hashlib``."""

    def update(self, data: memoryview | bytes, /) -> None:
        """Add bytes."""

    def hexdigest(self) -> str:
        """The digest of what was added."""


def _blake2b() -> Digest:
    return hashlib.blake2b(digest_size=16)


_ALGORITHMS: dict[str, Callable[[], Digest]] = {"blake2b": _blake2b}
if xxhash is not None:
    _ALGORITHMS["xxh3_128"] = xxhash.xxh3_128
ALGORITHM = max(_ALGORITHMS)


def new_digest(algorithm: str = ALGORITHM) -> Digest:
    """An empty digest.

    Raises:
        CheckpointError: the algorithm is unknown, or its package is not installed.
    """
    if algorithm not in _ALGORITHMS:
        way_out = "Install the package xxhash." if algorithm == "xxh3_128" else "Use the version that wrote it."
        raise CheckpointError(f"digests by {algorithm!r} cannot be computed here. {way_out}")
    return _ALGORITHMS[algorithm]()


def written_as(digest: Digest) -> str:
    """A digest with its algorithm, as it is stored."""
    return f"{ALGORITHM}:{digest.hexdigest()}"


def tensor_digest(tensor: Tensor) -> str:
    """A digest of a tensor's values."""
    digest = new_digest()
    host = tensor.detach().cpu().contiguous().reshape(-1)
    digest.update(host.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def bytes_match(stored: str, data: bytes) -> bool:
    """Whether bytes have a stored digest.

    Raises:
        CheckpointError: see :func:`new_digest`.
    """
    algorithm, _, expected = stored.partition(":")
    digest = new_digest(algorithm)
    digest.update(data)
    return digest.hexdigest() == expected


def file_matches(stored: str, path: AnyPath) -> bool:
    """Whether a file has a stored digest.

    Raises:
        CheckpointError: see :func:`new_digest`.
        OSError: the file cannot be read.
    """
    algorithm, _, expected = stored.partition(":")
    digest, block = new_digest(algorithm), memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest() == expected
