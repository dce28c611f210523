"""Weights on disk."""

from hybridpp.checkpoint.folder import read_folder, write_folder
from hybridpp.checkpoint.gather import gather_objects, gather_tensors

__all__ = ["gather_objects", "gather_tensors", "read_folder", "write_folder"]
