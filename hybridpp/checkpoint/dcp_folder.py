"""Folders of ``torch.distributed.checkpoint``, read in one process, without running code of theirs."""

import io
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from hybridpp.checkpoint.export_run import one_process
from hybridpp.checkpoint.safetensors_file import StoredSpec
from hybridpp.checkpoint.schema import read_limited
from hybridpp.errors import CheckpointError, named, text_of

METADATA = ".metadata"
_MOST_METADATA_BYTES = 2**29
# What DCP calls the files that hold values.
_DATA_FILE = re.compile(r"[\w.-]*\.(distcp|safetensors)", re.ASCII)
# What a metadata file is made of: classes that hold values, by module.
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
        *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", "device"),
    "collections": ("OrderedDict",),
    "builtins": ("set", "frozenset"),
    "pathlib": ("Path", "PosixPath", "PurePosixPath", "PurePath"),
}


class _SafeUnpickler(pickle.Unpickler):
    """Reads a metadata file; whatever else a pickle names is refused, and so not called."""

    def find_class(self, module: str, name: str) -> Any:
        """The class that is named, of those that metadata consist of."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout)
        if name not in _ALLOWED.get(module, ()) and not is_dtype:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of such a file")
        return super().find_class(module, name)


class _SafeReader(FileSystemReader):
    """A reader of a folder that may come from anyone."""

    def __init__(self, path: Path):
        super().__init__(path)
        self._folder = path

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the folder holds.

        Raises:
            ValueError: it is of something else, or names files that are not directly in the folder.
        """
        data = read_limited(self._folder / METADATA, _MOST_METADATA_BYTES)
        found = _SafeUnpickler(io.BytesIO(data)).load()
        if not isinstance(found, Metadata) or not isinstance(found.storage_data, Mapping):
            raise ValueError("its .metadata is none of this format")
        files = set[Path]()
        for stored in found.storage_data.values():
            name = getattr(stored, "relative_path", None)
            if not isinstance(name, str) or _DATA_FILE.fullmatch(name) is None:
                raise ValueError(f"its .metadata names a file {name!r:.80}, which is none of such a folder")
            files.add(self._folder / name)
        for file in sorted(files):
            if file.exists() and not file.is_file():  # to open a named pipe would wait for ever
                raise ValueError(f"its file {file.name} is no regular file")
        if found.storage_meta is None:
            found.storage_meta = StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _SafePlanner(DefaultLoadPlanner):
    """A planner that reads what is no tensor without running code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class DcpFolder:
    """A folder that ``torch.distributed.checkpoint.save`` wrote. Of its pickles, no code is run.

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
        self._names: dict[tuple[Any, ...], str] = {}
        self.specs: dict[tuple[Any, ...], StoredSpec] = {}
        self.others: list[tuple[Any, ...]] = []
        try:
            metadata = _SafeReader(path).read_metadata()
            self._fill(metadata)
        except Exception as error:  # whatever a damaged pickle raises
            raise CheckpointError(
                f"{path} cannot be read as a folder of torch.distributed.checkpoint: {named(error)}."
            ) from error

    def _fill(self, metadata: Metadata) -> None:
        planned = metadata.planner_data
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
                    storage_reader=_SafeReader(self._path),
                    planner=_SafePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                    no_dist=True,
                )
        except BaseException as error:  # CheckpointException of DCP is no Exception
            if isinstance(error, KeyboardInterrupt):
                raise
            raise CheckpointError(
                f"{self._path}: {'.'.join(map(str, keys))} cannot be read: {text_of(error)}."
            ) from error
        return state[self._names[keys]]
