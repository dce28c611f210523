"""Outputs of conversions: a file or a folder that is there completely or not at all."""

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridpp.checkpoint.remote_path import sync
from hybridpp.errors import CheckpointError, HybridppError
from hybridpp.sizes import format_bytes


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
                f"{path} cannot be written: {why_not_written(error, path)}. Free space, or pass another path."
            ) from error
        raise


@contextmanager
def library_errors(path: Path) -> Iterator[None]:
    """A context in which a library writes to ``path``: each has errors of its own for a disk that is full.

    Raises:
        OSError: of whatever the library raises.
    """
    try:
        yield
    except (HybridppError, OSError, MemoryError):
        raise
    except Exception as error:
        raise OSError(errno.EIO, why_not_written(error, path), str(path)) from error
    except BaseException as error:
        if not type(error).__module__.startswith("torch."):  # an error of torch.distributed.checkpoint is no Exception
            raise
        raise OSError(errno.EIO, why_not_written(error, path), str(path)) from error


def why_not_written(error: BaseException, path: Path) -> str:
    """Why a file could not be written, in words: what the system said, as far as a library passes it on."""
    first: BaseException | None = error
    while first is not None:
        if isinstance(first, OSError) and first.strerror:
            return first.strerror
        first = first.__cause__ or first.__context__
    text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    existing = next((one for one in (path, *path.parents) if one.exists()), None)
    free = "" if existing is None else f" ({format_bytes(shutil.disk_usage(existing).free)} are free there)"
    return f"{text[:200]}{free}"


def refuse_existing(path: Path) -> None:
    """Refuse to overwrite something.

    Raises:
        CheckpointError: ``path`` exists.
    """
    if os.path.lexists(path):
        raise CheckpointError(f"{path} exists, and is not overwritten. Remove it, or pass another path.")
