"""Folders of ``torch.distributed.checkpoint``, read in one process by its public interface."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from hybridpp.checkpoint.export_run import one_process
from hybridpp.checkpoint.safetensors_file import StoredSpec
from hybridpp.errors import CheckpointError

METADATA = ".metadata"


class _SafePlanner(DefaultLoadPlanner):
    """A planner that reads what is no tensor without running code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class DcpFolder:
    """A folder that ``torch.distributed.checkpoint.save`` wrote. Its ``.metadata`` is a pickle, which may run code.

    Args:
        path: of the folder.

    Attributes:
        specs: of its tensors, by the path of keys that lead to each in the state dict.
        others: the paths of what is no tensor.

    Raises:
        CheckpointError: it cannot be read.
    """

    def __init__(self, path: Path):
        self._path = path
        try:
            metadata: Metadata = FileSystemReader(path).read_metadata()
        except Exception as error:  # whatever a damaged pickle raises
            raise CheckpointError(
                f"{path} cannot be read as a folder of torch.distributed.checkpoint: {type(error).__name__}: {error}."
            ) from error
        planned = metadata.planner_data
        self._names: dict[tuple[Any, ...], str] = {}
        self.specs: dict[tuple[Any, ...], StoredSpec] = {}
        self.others: list[tuple[Any, ...]] = []
        for name, stored in metadata.state_dict_metadata.items():
            keys = tuple(planned[name]) if isinstance(planned, Mapping) and name in planned else (name,)
            self._names[keys] = name
            if isinstance(stored, TensorStorageMetadata):
                self.specs[keys] = StoredSpec(stored.properties.dtype, tuple(stored.size))
            else:
                self.others.append(keys)

    def tensor(self, keys: tuple[Any, ...]) -> Tensor:
        """One tensor.

        Raises:
            CheckpointError: it cannot be read.
        """
        spec = self.specs[keys]
        found: Tensor = self._read(keys, torch.empty(spec.shape, dtype=spec.dtype))
        return found

    def value(self, keys: tuple[Any, ...]) -> Any:
        """What is no tensor.

        Raises:
            CheckpointError: it cannot be read without running code.
        """
        return self._read(keys, None)

    def _read(self, keys: tuple[Any, ...], target: Any) -> Any:
        state = {self._names[keys]: target}
        try:
            with one_process():
                load(
                    state,
                    storage_reader=FileSystemReader(self._path),
                    planner=_SafePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                    no_dist=True,
                )
        except BaseException as error:  # CheckpointException of DCP is no Exception
            if isinstance(error, KeyboardInterrupt):
                raise
            raise CheckpointError(f"{self._path}: {'.'.join(map(str, keys))} cannot be read: {error}.") from error
        return state[self._names[keys]]
