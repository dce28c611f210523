"""Replace a set of weight files by a new one, so that a kill at any point leaves one complete set.

A rename changes one file only, so one rename decides, and until then the old set is not touched::

    one file, same config     model.safetensors is replaced
    several, same config      files under new names, then the index; where there is a model.safetensors, which is read
                              before any index, its removal decides
    another config            files and index under new names, then a config.json that points to them: it decides; then
                              the usual names, and the final config

For the moments in which there are a ``model.safetensors`` and an index, a note says that the index does not count
(:mod:`hybridpp.checkpoint.staging_folder`).
"""

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from hybridpp.checkpoint.index import (
    CONFIG,
    MODEL,
    POINTER,
    WeightNames,
    digest_of,
    files_of_a_model,
    listed,
)
from hybridpp.checkpoint.remote_path import sync
from hybridpp.checkpoint.staging_folder import NOTE, UnfinishedSave, identity, write_unfinished
from hybridpp.errors import CheckpointError


@dataclass(frozen=True)
class _NewWeights:
    """Weight files in a staging folder, and how they are moved to the target.

    Attributes:
        staging: the folder that holds them, with an index under the usual name unless ``is_direct``.
        folder: the target.
        names: what they are called in the end.
        files: their present names, which do not exist in the folder.
        is_single: whether there is one file, whose final name is ``names.single``.
        is_direct: whether it can have that name at once.
        changes_config: whether the folder holds weights that need another config than these.
    """

    staging: Path
    folder: Path
    names: WeightNames
    files: tuple[str, ...]
    is_single: bool
    is_direct: bool
    changes_config: bool


def replace_weights(staging: Path, folder: Path, names: WeightNames = MODEL) -> None:
    """Move everything in ``staging`` to ``folder``, replacing its weights; then remove the old ones.

    At any time, readers of the folder find the old weights or the new ones. Files that are neither weights nor in
    ``staging`` stay. Nothing is written through a link in the folder.

    Args:
        staging: a folder in ``folder``.
        folder: that others read.
        names: of the files of weights in ``staging``.

    Raises:
        CheckpointError: a folder that files belong to is a link.
    """
    old = files_of_a_model(folder)
    new = _prepare(staging, folder, names, old)
    for path in staging.rglob("*"):
        sync(path)
    # The index that may exist next to a model.safetensors.
    stale = digest_of((folder if new.is_direct else staging) / names.index)
    unique_index = names.unique(names.index, identity(staging))
    unique_files = () if new.is_direct else (*new.files, unique_index)
    write_unfinished(staging, UnfinishedSave(stale=(stale,) if stale else (), files=unique_files))
    sync(folder)
    _move_others(new)
    if new.is_direct:
        _move(staging / names.single, folder / names.single)
        current = {names.single}
    else:
        _move_by_index(new, unique_index)
        current = {names.single} if new.is_single else {names.index, *new.files}
    _remove((old | files_of_a_model(folder)) - current, folder)
    shutil.rmtree(staging)


def _prepare(staging: Path, folder: Path, names: WeightNames, old: set[str]) -> _NewWeights:
    """Give the weights names that do not exist in the folder, and write an index of them."""
    is_single = (staging / names.single).is_file()
    changes_config = bool(old) and _differ(staging / CONFIG, folder / CONFIG)
    is_direct = is_single and not changes_config
    if is_direct:
        return _NewWeights(staging, folder, names, (names.single,), is_single, is_direct, changes_config)
    locations = _keys(staging / names.single) if is_single else listed(staging / names.index)
    renamed = {name: name for name in sorted(set(locations.values()))}
    if is_single or any(os.path.lexists(folder / name) for name in renamed):
        renamed = {name: names.unique(name, identity(staging)) for name in renamed}
        for name, unique_name in renamed.items():
            os.replace(staging / name, staging / unique_name)
    index = {"metadata": {}} if is_single else json.loads((staging / names.index).read_text())
    if is_single:  # transformers needs a size
        index["metadata"]["total_size"] = (staging / renamed[names.single]).stat().st_size
    index["weight_map"] = {key: renamed[name] for key, name in locations.items()}
    (staging / names.index).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return _NewWeights(staging, folder, names, tuple(renamed.values()), is_single, is_direct, changes_config)


def _keys(file: Path) -> dict[str, str]:
    with safe_open(file, framework="pt") as handle:
        return dict.fromkeys(handle.keys(), file.name)  # no mapping


def _differ(new: Path, old: Path) -> bool:
    return new.is_file() and not (old.is_file() and old.read_bytes() == new.read_bytes())


def _move_others(new: _NewWeights) -> None:
    """Move files that are neither weights nor the config that must change with them."""
    later = {*new.files, new.names.index, *([CONFIG] if new.changes_config else [])}
    for path in sorted(new.staging.rglob("*")):
        relative = path.relative_to(new.staging)
        if path.is_file() and str(relative) not in later and str(relative) != NOTE:
            for parent in relative.parents:
                if (new.folder / parent).is_symlink() and parent != Path():
                    raise CheckpointError(
                        f"{new.folder / parent} is a link, through which a save does not write. Remove it, or pass "
                        "another path."
                    )
            (new.folder / relative).parent.mkdir(parents=True, exist_ok=True)
            _move(path, new.folder / relative)


def _move_by_index(new: _NewWeights, unique_index: str) -> None:
    staging, folder, index = new.staging, new.folder, new.names.index
    for name in new.files:
        _move(staging / name, folder / name)
    if new.changes_config:
        shutil.copyfile(staging / index, staging / unique_index)
        sync(staging / unique_index)
        _move(staging / unique_index, folder / unique_index)
        pointing = staging / f"pointing-{CONFIG}"
        pointing.write_text(json.dumps({**json.loads((staging / CONFIG).read_text()), POINTER: unique_index}, indent=2))
        sync(pointing)
        _move(pointing, folder / CONFIG)
    _move(staging / index, folder / index)
    _remove([new.names.single], folder)
    if new.changes_config:
        _move(staging / CONFIG, folder / CONFIG)
    if new.is_single:
        _move(folder / new.files[0], folder / new.names.single)
        _remove([index], folder)


def _move(source: Path, target: Path) -> None:
    os.replace(source, target)
    # Durable before anything else is done.
    sync(target.parent)


def _remove(names: Iterable[str], folder: Path) -> None:
    for name in sorted(names):
        (folder / name).unlink(missing_ok=True)
    sync(folder)
