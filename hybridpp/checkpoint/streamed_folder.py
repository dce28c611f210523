"""Write a folder of weights file by file, with one tensor in memory, or those that one conversion makes."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from hybridpp.checkpoint.hub_tensors import OutputGroup
from hybridpp.checkpoint.index import MODEL, WeightNames
from hybridpp.checkpoint.safetensors_file import StoredSpec, write_safetensors

# More bytes than any model has.
_ALL = 2**62


class PlannedFile(NamedTuple):
    """A file of a folder.

    Attributes:
        name: of the file.
        outputs: its tensors, in their order.
        reads: names of the model's tensors that are read to write it, in the order in which they are taken.
    """

    name: str
    outputs: dict[str, StoredSpec]
    reads: tuple[str, ...]


class StreamedFolder:
    """A folder of weights that is being written.

    Args:
        groups: of what it will hold.
        max_shard_size: of a file, like ``"1024MB"``; a larger tensor has one for itself. None: one file has all.
        names: of the files.

    Attributes:
        files: what is written, in this order.
    """

    def __init__(self, groups: Sequence[OutputGroup], max_shard_size: str | None, names: WeightNames = MODEL):
        specs = {name: spec for group in groups for name, spec in group.outputs.items()}
        self._group_of = {name: group for group in groups for name in group.outputs}
        self._made: dict[str, Tensor] = {}
        empty = {name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in specs.items()}
        split = split_torch_state_dict_into_shards(
            empty,
            filename_pattern=f"{names.base}{{suffix}}.safetensors",
            max_shard_size=_ALL if max_shard_size is None else max_shard_size,
        )
        self._names = names
        self._index: dict[str, Any] | None = None
        if split.is_sharded:
            self._index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        read: set[int] = set()
        self.files = [
            self._planned(name, {each: specs[each] for each in names}, read)
            for name, names in split.filename_to_tensors.items()
        ]

    def _planned(self, file: str, specs: dict[str, StoredSpec], read: set[int]) -> PlannedFile:
        ordered = dict(sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize))
        reads: list[str] = []
        for name in ordered:
            group = self._group_of[name]
            if id(group) not in read:
                read.add(id(group))
                reads += group.sources
        return PlannedFile(file, ordered, tuple(reads))

    def write(
        self, path: Path, file: PlannedFile, tensors: Iterable[Tensor], written: Callable[[int], Any] | None = None
    ) -> None:
        """Write a file.

        Args:
            path: where to.
            file: the next of :attr:`files`.
            tensors: the model's, in the order of ``file.reads``.
            written: called with the number of bytes of each tensor, after it.

        Raises:
            CheckpointError: a tensor has an unexpected shape, or a dtype that files cannot hold.
            OSError: the file cannot be written.
        """
        write_safetensors(path, file.outputs, self._outputs(file, iter(tensors)), written)

    def _outputs(self, file: PlannedFile, tensors: Iterator[Tensor]) -> Iterator[Tensor]:
        for name in file.outputs:
            if name not in self._made:
                group = self._group_of[name]
                self._made |= group.made({source: next(tensors) for source in group.sources})
            yield self._made.pop(name)

    def write_index(self, folder: Path) -> None:
        """Write the index, if there are several files."""
        if self._index is not None:
            (folder / self._names.index).write_text(json.dumps(self._index, indent=2, sort_keys=True) + "\n")
