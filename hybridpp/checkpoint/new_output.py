"""Outputs of conversions: a file or a folder that is there completely or not at all."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridpp.checkpoint.remote_path import sync
from hybridpp.errors import CheckpointError


@contextmanager
def new_output(path: Path) -> Iterator[Path]:
    """A context with a temporary path next to ``path``, which becomes ``path`` at the end unless there is an error.

    Raises:
        CheckpointError: ``path`` exists, or cannot be written.
    """
    refuse_existing(path)
    temporary = path.parent / f".{path.name}.hybridpp-{secrets.token_hex(4)}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        for written in (*temporary.rglob("*"), temporary):
            sync(written)
        refuse_existing(path)
        os.rename(temporary, path)
        sync(path.parent)
    except BaseException as error:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"{path} cannot be written: {error.strerror or error}. Free space, or pass another path."
            ) from error
        raise


def refuse_existing(path: Path) -> None:
    """Refuse to overwrite something.

    Raises:
        CheckpointError: ``path`` exists.
    """
    if os.path.lexists(path):
        raise CheckpointError(f"{path} exists, and is not overwritten. Remove it, or pass another path.")
