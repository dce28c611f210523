"""Weights on disk, and models that wait for theirs."""

from hybridpp.checkpoint.folder import open_folder, write_folder
from hybridpp.checkpoint.gather import gather_objects, gather_tensors
from hybridpp.checkpoint.meta import allocate, derive_buffers
from hybridpp.checkpoint.read import Contents

__all__ = [
    "Contents",
    "allocate",
    "derive_buffers",
    "gather_objects",
    "gather_tensors",
    "open_folder",
    "write_folder",
]
