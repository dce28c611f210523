"""Checkpoints in a folder: one folder per step, which counts from the moment that it has its manifest.

Data files have names that no other save gives, so a save of the same step leaves those of the old one alone until the
new manifest replaces the old one. After that, nothing refers to the old files.
"""

import os
import re
import secrets
from collections.abc import Collection

from hybridpp.checkpoint.manifest import DATA_FILE, MANIFEST, Manifest
from hybridpp.checkpoint.reader import read_manifest
from hybridpp.checkpoint.remote_path import AnyPath, RemotePath, sync_path
from hybridpp.errors import CheckpointError

_STEP = re.compile(r"step-(\d{8,})", re.ASCII)
# A manifest that is being written; the file by which ranks find out whether they share a file system; what ranks say of
# a save in the background.
_TEMPORARY = re.compile(
    r"manifest\.[0-9a-f]{8}\.tmp|\.saving-[0-9a-f]{8}|part-\d{5,}\.[0-9a-f]{8}\.json(\.tmp)?", re.ASCII
)


def step_folder(path: AnyPath, step: int) -> AnyPath:
    """The folder of a step."""
    return path / f"step-{step:08d}"


def new_save_id() -> str:
    """Eight characters that identify a save."""
    return secrets.token_hex(4)


def token_file(folder: AnyPath, save_id: str) -> AnyPath:
    """A file that exists while a save is running."""
    return folder / f".saving-{save_id}"


def part_file(folder: AnyPath, save_id: str, rank: int) -> AnyPath:
    """A file that says what a rank wrote, in a save in the background."""
    return folder / f"part-{rank:05d}.{save_id}.json"


def is_committed(folder: AnyPath, save_id: str) -> bool:
    """Whether a folder has the manifest of a save."""
    try:
        return read_manifest(folder).save_id == save_id
    except CheckpointError:
        return False


def refuse_link(folder: AnyPath) -> None:
    """Refuse to write to the folder of a step that is a link: where it leads is not the run's folder.

    Raises:
        CheckpointError: it is one.
    """
    if folder.is_symlink():
        raise CheckpointError(
            f"{folder} is a link, through which a save does not write. Remove the link, or pass another path or step."
        )


def begin(path: AnyPath, step: int, save_id: str) -> None:
    """Make the folder of a step, and the token of a save; see :func:`refuse_link` and :func:`begin_in`."""
    refuse_link(step_folder(path, step))
    begin_in(step_folder(path, step), save_id)


def begin_in(folder: AnyPath, save_id: str) -> None:
    """Make a folder, and the token of a save.

    Raises:
        OSError: it cannot be written to.
    """
    is_new = not folder.parent.exists()
    folder.mkdir(parents=True, exist_ok=True)
    if is_new:
        sync_path(folder.parent.parent)
    token_file(folder, save_id).touch(exist_ok=False)


def commit(path: AnyPath, manifest: Manifest) -> None:
    """Let the checkpoint of a step count; see :func:`commit_in`."""
    commit_in(step_folder(path, manifest.step), manifest)


def commit_in(folder: AnyPath, manifest: Manifest) -> None:
    """Let a checkpoint count, whose data files are on disk.

    Raises:
        CheckpointError: a data file is gone, which another job may have removed as incomplete.
        OSError: the manifest cannot be written; then what was there before still counts.
    """
    for name, written in manifest.files.items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != written.nbytes:
            raise CheckpointError(
                f"{folder / name} was removed or changed while the checkpoint was written. Let only one job save to "
                f"{folder.parent}."
            )
    if isinstance(folder, RemotePath):
        (folder / MANIFEST).write_bytes(manifest.to_bytes())
        return
    temporary = folder / f"manifest.{manifest.save_id}.tmp"
    try:
        with temporary.open("xb") as file:
            file.write(manifest.to_bytes())
            file.flush()
            os.fsync(file.fileno())
        sync_path(folder)  # the names of the data files
        sync_path(folder.parent)
        os.replace(temporary, folder / MANIFEST)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_path(folder)


def steps(path: AnyPath) -> list[int]:
    """The steps that have a folder, the newest first; where there is no folder, there are none.

    Raises:
        CheckpointError: the path cannot be read.
    """
    if not path.is_dir():
        return []
    try:
        found = [(_STEP.fullmatch(entry.name), entry) for entry in path.iterdir()]
        numbers = [int(name[1]) for name, entry in found if name is not None and entry.is_dir()]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. Pass the folder of checkpoints.") from error
    return sorted((number for number in numbers if step_folder(path, number).is_dir()), reverse=True)


def committed_steps(path: AnyPath) -> list[int]:
    """The steps whose folder has a manifest, the newest first."""
    return [step for step in steps(path) if (step_folder(path, step) / MANIFEST).is_file()]


def open_step(path: AnyPath, step: int) -> Manifest:
    """The manifest of a step.

    Raises:
        CheckpointError: it is damaged, not of this step or of no run, or files are missing or have other sizes.
    """
    manifest = read_manifest(step_folder(path, step))
    if manifest.step != step:
        raise CheckpointError(f"{MANIFEST} is of step {manifest.step}")
    if "models" not in manifest.state:
        raise CheckpointError(f"{MANIFEST} is not of a run, but of an optimizer or an LR schedule alone")
    return manifest


def remove_old(path: AnyPath, current: Manifest, keep_last: int | None) -> list[str]:
    """Remove older checkpoints and what killed saves left; returns what could not be removed, and why.

    A step that was moved elsewhere, and is a link here, loses the link only.

    Call it after ``current`` was committed, so that whatever happens here, a checkpoint that is intact stays.

    Args:
        path: the folder of checkpoints.
        current: the newest, which stays.
        keep_last: how many checkpoints stay, besides those of later steps; None: all.
    """
    problems: list[str] = []
    committed = committed_steps(path)
    older = [step for step in committed if step < current.step]
    dropped = set() if keep_last is None else set(older[keep_last - 1 :])
    for step in steps(path):
        try:
            if step == current.step:
                clean(step_folder(path, step), {*current.files})
            elif step in dropped or (step not in committed and not step_folder(path, step).is_symlink()):
                _drop(step_folder(path, step))
        except OSError as error:
            problems.append(f"{step_folder(path, step)}: {error.strerror}")
    return problems


def _drop(folder: AnyPath) -> None:
    """Remove a checkpoint, its manifest first, so that it does not count while it is incomplete."""
    if folder.is_symlink():
        folder.unlink()
        sync_path(folder.parent)
        return
    (folder / MANIFEST).unlink(missing_ok=True)
    sync_path(folder)
    clean(folder, set())
    if not any(folder.iterdir()):
        folder.rmdir()
        sync_path(folder.parent)


def clean(folder: AnyPath, kept: Collection[str]) -> None:
    """Remove what saves wrote to a folder but for some files; other files stay.

    Raises:
        OSError: something cannot be removed.
    """
    entries: list[AnyPath] = list(folder.iterdir())
    for entry in entries:
        written_by_us = DATA_FILE.fullmatch(entry.name) or _TEMPORARY.fullmatch(entry.name)
        if written_by_us and entry.name not in kept:
            entry.unlink(missing_ok=True)
