"""Staging folder of a save: a hidden folder in the target, which loads ignore.

It also holds a note, for readers and for the save after a killed one, that lists the target's files to be ignored while
the note exists.
"""

import errno
import json
import os
import secrets
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from hybridpp.checkpoint.index import INDEX, SINGLE_FILE, digest_of, files_of, pointed_to

_PREFIX, NOTE = ".hybridpp-save-", "unfinished.json"
# Errors of file systems that cannot sync a folder.
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)


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
    """The files of a folder to be ignored."""
    notes = []
    for staging in folder.glob(f"{_PREFIX}*"):
        try:
            found = json.loads((staging / NOTE).read_text())
            notes.append(UnfinishedSave(tuple(map(str, found["stale"])), tuple(map(str, found["files"]))))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # killed before it wrote its note, and so before it changed anything else
    return UnfinishedSave(
        tuple(digest for note in notes for digest in note.stale), tuple(name for note in notes for name in note.files)
    )


def remove_leftovers(folder: Path) -> None:
    """Remove what killed saves left, without changing what a reader of the folder finds at any time."""
    leftovers = list(folder.glob(f"{_PREFIX}*"))
    if not leftovers:
        return
    note = unfinished(folder)
    if (folder / SINGLE_FILE).is_file() and digest_of(folder / INDEX) in note.stale:
        os.unlink(folder / INDEX)
    counting = files_of(folder / INDEX)
    if pointer := pointed_to(folder):
        counting |= {pointer, *files_of(folder / pointer)}
    for name in {*note.files} - counting:
        (folder / name).unlink(missing_ok=True)
    sync(folder)
    for staging in leftovers:
        shutil.rmtree(staging)


def sync(path: Path) -> None:
    """Sync a file, or a folder's entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if not path.is_dir() or error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(handle)
