"""Weights on disk, and models on the meta device."""

from hybridpp.checkpoint.folder import SaveTarget, open_folder
from hybridpp.checkpoint.meta import allocate, derive_buffers, swap_value, without_flat_weights
from hybridpp.checkpoint.read import CheckpointContents

__all__ = [
    "CheckpointContents",
    "SaveTarget",
    "allocate",
    "derive_buffers",
    "open_folder",
    "swap_value",
    "without_flat_weights",
]
