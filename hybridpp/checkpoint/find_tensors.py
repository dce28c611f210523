"""Find the tensors of a folder of weights, and decide which of its files are current."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybridpp.checkpoint.index import DIFFUSION, MODEL, WeightNames, digest_of, listed, names_in, pointed_to
from hybridpp.checkpoint.remote_path import dangling_link
from hybridpp.checkpoint.staging_folder import unfinished
from hybridpp.errors import CheckpointError, text_of


class TensorLocation(NamedTuple):
    """A tensor on disk: its file, and its name in the file."""

    file: Path
    key: str


def find_tensors(
    path: Path, from_pretrained: bool = False, accepted: Sequence[WeightNames] = (MODEL, DIFFUSION)
) -> dict[str, TensorLocation]:
    """Locate each tensor of a folder: in ``model.safetensors``, else in the files that the index names, else in any
    file.

    Args:
        path: the folder; or a single file.
        from_pretrained: whether the folder's config is read first, as in transformers.
        accepted: names of the weights; the first that are there count.

    Raises:
        CheckpointError: a file is broken, or the folder holds two models.
    """
    if path.is_file():
        return _in_files([path])
    if from_pretrained and (pointer := pointed_to(path)):
        return _indexed(path / pointer) if pointer.endswith(".json") else _in_files([path / pointer])
    names = names_in(path, accepted)
    single, index = path / names.single, path / names.index
    if single.is_file():
        if index.is_file() and digest_of(index) not in unfinished(path).stale:
            _check_one_model(single, index)
        return _in_files([single])
    if index.is_file():
        return _indexed(index)
    moved_too_early = unfinished(path).files
    return _in_files(file for file in sorted(path.glob("*.safetensors")) if file.name not in moved_too_early)


def _indexed(index: Path) -> dict[str, TensorLocation]:
    return {key: TensorLocation(index.parent / name, key) for key, name in listed(index).items()}


def _in_files(files: Iterable[Path]) -> dict[str, TensorLocation]:
    locations: dict[str, TensorLocation] = {}
    for file in files:
        with opened(file) as handle:
            for key in handle.keys():  # noqa: SIM118  # no mapping
                if key in locations:
                    raise CheckpointError(
                        f"{file.parent} holds {key!r} in {locations[key].file.name} and in {file.name}, and no "
                        f"{MODEL.index} that says which one is current. Remove the outdated files."
                    )
                locations[key] = TensorLocation(file, key)
    return locations


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """Open a safetensors file; read errors become :class:`~hybridpp.errors.CheckpointError`."""
    if file.exists() and not file.is_file():  # to open a named pipe would wait for ever, in native code
        raise CheckpointError(f"{file} is no regular file. Copy it again, or save the model again.")
    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except (OSError, SafetensorError) as error:
        why = dangling_link(file) or text_of(error)
        raise CheckpointError(
            f"{file} cannot be read as a safetensors file: {why}. Copy it again, or save the model again."
        ) from error


def _check_one_model(single: Path, index: Path) -> None:
    """Refuse a ``model.safetensors`` next to an index of other weights: one of them is outdated.

    When transformers saves a single file over several, it leaves the index without the files that it names.
    """
    locations = _indexed(index)
    files = {location.file for location in locations.values()}
    missing = {file for file in files if not file.is_file()}
    if missing == files or (not missing and _look_alike(_in_files([single]), locations)):
        return
    dates = [datetime.fromtimestamp(file.stat().st_mtime).isoformat(" ", "seconds") for file in (single, index)]
    raise CheckpointError(
        f"{single.parent} holds two models: {single.name}, written {dates[0]}, which from_pretrained reads, and what "
        f"{index.name}, written {dates[1]}, names. Remove the outdated one."
    )


def _look_alike(some: dict[str, TensorLocation], others: dict[str, TensorLocation]) -> bool:
    """Whether two sets of tensors have the same names and shapes, and equal values at both ends of each tensor."""
    if set(some) != set(others):
        return False
    for key, location in some.items():
        with opened(location.file) as one, opened(others[key].file) as other:
            first, second = one.get_slice(key), other.get_slice(key)
            if first.get_shape() != second.get_shape() or first.get_dtype() != second.get_dtype():
                return False
            if not all(map(_same_bits, _ends(one, key), _ends(other, key))):
                return False
    return True


def _ends(handle: Any, key: str) -> list[Tensor]:
    stored = handle.get_slice(key)
    if not stored.get_shape() or not stored.get_shape()[0]:
        return [handle.get_tensor(key)]
    return [stored[:1], stored[-1:]]


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))
