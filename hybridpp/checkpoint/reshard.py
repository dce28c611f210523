"""Write a checkpoint anew, in other files."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybridpp.checkpoint.boxes import Box, full_box, split_box
from hybridpp.checkpoint.commit import begin, commit, committed_steps, new_save_id, step_folder, token_file
from hybridpp.checkpoint.manifest import FileEntry, Manifest, TensorEntry, check
from hybridpp.checkpoint.reader import fill, plan_reads
from hybridpp.checkpoint.remote_path import AnyPath
from hybridpp.checkpoint.safetensors_file import StoredSpec
from hybridpp.checkpoint.writer import Holding, WritablePart, WrittenFiles, remove, write_parts
from hybridpp.errors import CheckpointError

_MAX_RANKS = 1 << 16


def reshard(
    folder: AnyPath,
    manifest: Manifest,
    out: AnyPath,
    num_ranks: int,
    file_bytes: int,
    on_written: Callable[[int], Any] | None = None,
) -> Manifest:
    """Write a checkpoint as so many ranks would have written it, with one part of a tensor in memory.

    Args:
        folder: of the step.
        manifest: of the checkpoint.
        out: a folder of checkpoints, which has none of this step.
        num_ranks: each writes files of its own, about equally many bytes.
        file_bytes: the most that a file holds.
        on_written: called with the number of bytes of the tensors in each file, after it.

    Returns:
        The new manifest.

    Raises:
        CheckpointError: ``out`` has a checkpoint of this step, or cannot be written; or there are too many ranks.
    """
    if num_ranks > _MAX_RANKS:
        raise CheckpointError(
            f"a checkpoint is divided among at most {_MAX_RANKS:,} ranks: got {num_ranks}. Use fewer."
        )
    total = sum(entry.nbytes for entry in manifest.tensors.values())
    # Large tensors are divided, so that no rank has much more than its share.
    largest = max(1, min(file_bytes, -(-total // num_ranks)))
    by_rank: list[list[WritablePart]] = [[] for _ in range(num_ranks)]
    done = 0
    for part in _parts(folder, manifest, largest):
        by_rank[min(done * num_ranks // max(1, total), num_ranks - 1)].append(part)
        done += part.nbytes
    return write_checkpoint(replace(manifest, save_id=new_save_id()), by_rank, out, file_bytes, on_written)


def _parts(folder: AnyPath, manifest: Manifest, largest: int) -> Iterator[WritablePart]:
    for key, entry in manifest.tensors.items():
        spec = StoredSpec(getattr(torch, entry.dtype), entry.shape)
        for number, box in enumerate(split_box(full_box(entry.shape), largest // spec.dtype.itemsize)):
            load = partial(_loaded, folder, manifest, key, box, spec.dtype)
            yield WritablePart(key, spec, box, f"{key}#{number}", load)


def _loaded(folder: AnyPath, manifest: Manifest, key: str, box: Box, dtype: torch.dtype) -> Tensor:
    part = torch.empty(box.shape, dtype=dtype)
    wanted = Holding(key, dtype, manifest.tensors[key].shape, [(box, part)])
    fill(folder, plan_reads(manifest.tensors, [wanted]))
    return part


def write_checkpoint(
    manifest: Manifest,
    by_rank: list[list[WritablePart]],
    out: AnyPath,
    file_bytes: int,
    on_written: Callable[[int], Any] | None = None,
) -> Manifest:
    """Write a checkpoint in one process.

    Args:
        manifest: says everything but files and tensors.
        by_rank: what each rank writes.
        out, file_bytes, on_written: see :func:`reshard`.

    Returns:
        The manifest that was written.

    Raises:
        CheckpointError: ``out`` has a checkpoint of this step, or cannot be written.
    """
    if manifest.step in committed_steps(out):
        raise CheckpointError(
            f"{out} holds a checkpoint of step {manifest.step}, which is not overwritten. Pass another folder."
        )
    folder, save_id = step_folder(out, manifest.step), manifest.save_id
    files: dict[str, FileEntry] = {}
    tensors: dict[str, TensorEntry] = {}
    try:
        begin(out, manifest.step, save_id)
        for rank, parts in enumerate(by_rank):
            written = write_parts(folder, f"rank-{rank:05d}.{save_id}", parts, file_bytes, on_written)
            files |= written.files
            _merge(tensors, written)
        complete = replace(manifest, files=files, tensors=tensors)
        check(complete)
        commit(out, complete)
    except BaseException as error:
        remove(folder / name for name in files)
        remove([token_file(folder, save_id)])
        for empty in (folder, out):
            try:
                empty.rmdir()
            except OSError:
                break
        if isinstance(error, OSError):
            raise CheckpointError(
                f"{out} cannot be written: {error.strerror or error}. Free space, or pass another path."
            ) from error
        raise
    remove([token_file(folder, save_id)])
    return complete


def _merge(tensors: dict[str, TensorEntry], written: WrittenFiles) -> None:
    for key, entry in written.tensors.items():
        known = tensors.get(key, TensorEntry(entry.dtype, entry.shape, ()))
        tensors[key] = replace(known, chunks=(*known.chunks, *entry.chunks))
