"""Staging folder of a save: a hidden folder in the target, which loads ignore.

It also holds a note, for readers and for the save after a killed one, that lists the target's files to be ignored while
the note exists.
"""

import json
import os
import re
import secrets
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from hybridpp.checkpoint.index import DIFFUSION, MODEL, digest_of, files_of, may_be_unfinished, pointed_to
from hybridpp.checkpoint.remote_path import sync
from hybridpp.checkpoint.schema import items, read_json, record, text

_PREFIX, NOTE = ".hybridpp-save-", "unfinished.json"
_NOTE = record({"stale": items(text()), "files": items(text())})
_MOST_NOTE_BYTES = 2**26
_STAGING = re.compile(re.escape(_PREFIX) + "[0-9a-f]{8}", re.ASCII)


@dataclass(frozen=True)
class UnfinishedSave:
    """Files to be ignored while a save is unfinished.

    Attributes:
        stale: digests of indexes that are ignored next to a ``model.safetensors``.
        files: names of files that are ignored unless an index names them.
    """

    stale: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


def stage(folder: Path) -> Path:
    """Create an empty staging folder in ``folder``, and remove those that killed saves left there."""
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    staging = folder / f"{_PREFIX}{secrets.token_hex(4)}"
    staging.mkdir()
    return staging


def identity(staging: Path) -> str:
    """Eight characters that identify this save."""
    return staging.name.removeprefix(_PREFIX)


def write_unfinished(staging: Path, note: UnfinishedSave) -> None:
    """Write the note; it applies until the staging folder is removed."""
    (staging / NOTE).write_text(json.dumps(asdict(note)))
    sync(staging / NOTE)
    sync(staging)


def unfinished(folder: Path) -> UnfinishedSave:
    """The files of a folder to be ignored.

    A folder may come from anyone, so of a note only names count that a save gives, in the folder itself.
    """
    notes = []
    for staging in _leftovers(folder):
        if staging.is_symlink():
            continue
        try:
            found = read_json(staging / NOTE, _MOST_NOTE_BYTES)
            _NOTE(found, "")
            files = tuple(name for name in found["files"] if may_be_unfinished(name))
            notes.append(UnfinishedSave(tuple(found["stale"]), files))
        except (OSError, ValueError):
            continue  # killed before it wrote its note, and so before it changed anything else
    return UnfinishedSave(
        tuple(digest for note in notes for digest in note.stale), tuple(name for note in notes for name in note.files)
    )


def _leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.glob(f"{_PREFIX}*") if _STAGING.fullmatch(path.name)]


def remove_leftovers(folder: Path) -> None:
    """Remove what killed saves left, without changing what a reader of the folder finds at any time."""
    leftovers = _leftovers(folder)
    if not leftovers:
        return
    note = unfinished(folder)
    counting = set[str]()
    for names in (MODEL, DIFFUSION):
        if (folder / names.single).is_file() and digest_of(folder / names.index) in note.stale:
            os.unlink(folder / names.index)
        counting |= files_of(folder / names.index)
    if pointer := pointed_to(folder):
        counting |= {pointer, *files_of(folder / pointer)}
    for name in {*note.files} - counting:
        if not (folder / name).is_dir() or (folder / name).is_symlink():
            (folder / name).unlink(missing_ok=True)
    sync(folder)
    for staging in leftovers:
        if staging.is_dir() and not staging.is_symlink():
            shutil.rmtree(staging)
        else:
            staging.unlink(missing_ok=True)
