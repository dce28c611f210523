"""Folders of checkpoints on object stores and other remote file systems, by fsspec.

A :class:`RemotePath` has those methods of ``pathlib.Path`` that checkpoints of runs use. A file appears with one
request, complete, so nothing is synced or renamed there.
"""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import fsspec

from hybridpp.errors import ConfigError, named, text_of
from hybridpp.saving import require_path

_T = TypeVar("_T")
# These are local: their files are synced to disk, which fsspec would not do.
_LOCAL = ("file://", "local://")
# Errors of file systems that cannot sync a folder.
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)


class RemoteStat(NamedTuple):
    """Facts about a remote file.

    Attributes:
        st_size: its bytes.
        st_mtime: when it was written, in seconds since 1970; 0: the file system does not say.
    """

    st_size: int
    st_mtime: float


class RemotePath:
    """A path on a remote file system. Every failure of that is an ``OSError`` with a text.

    Args:
        file_system: of fsspec.
        path: there, without protocol.
    """

    def __init__(self, file_system: Any, path: str):
        self._fs, self._path = file_system, path.rstrip("/")

    def __str__(self) -> str:
        return str(self._fs.unstrip_protocol(self._path))

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(self._fs, f"{self._path}/{name}")

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self._path.rpartition("/")[2]

    @property
    def parent(self) -> "RemotePath":
        """The folder that it is in."""
        return RemotePath(self._fs, self._path.rpartition("/")[0])

    def exists(self) -> bool:
        """Whether it is a file, or a folder with files."""
        return self._try(lambda: bool(self._fs.exists(self._path)))

    def is_file(self) -> bool:
        """Whether it is a file."""
        return self._try(lambda: bool(self._fs.isfile(self._path)))

    def is_dir(self) -> bool:
        """Whether it is a folder."""
        return self._try(lambda: bool(self._fs.isdir(self._path)))

    def is_symlink(self) -> bool:
        """False: no link can lead elsewhere."""
        return False

    def iterdir(self) -> Iterator["RemotePath"]:
        """What is in the folder; nothing, if it does not exist."""
        try:
            names = self._try(lambda: list(self._fs.ls(self._path, detail=False)))
        except FileNotFoundError:
            names = []
        own = self._path.rpartition("/")[2]
        found = (str(name).rstrip("/").rpartition("/")[2] for name in names)
        return (self / name for name in found if name and (name != own or len(names) > 1))

    def stat(self) -> RemoteStat:
        """Its size and its time."""
        size = self._try(lambda: int(self._fs.info(self._path)["size"]))
        try:
            return RemoteStat(size, float(self._fs.modified(self._path).timestamp()))
        except Exception:  # many file systems do not know
            return RemoteStat(size, 0.0)

    def open(self, mode: str = "rb", buffering: int = -1) -> Any:
        """The file, to read."""
        return self._try(lambda: self._fs.open(self._path, mode))

    def read_bytes(self) -> bytes:
        """All of the file."""
        return self._try(lambda: bytes(self._fs.cat_file(self._path)))

    def read_text(self) -> str:
        """All of the file, as text."""
        return self.read_bytes().decode()

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Several ranges of bytes, each from its start to the byte before its end."""
        paths = [self._path] * len(ranges)
        starts, ends = [start for start, _ in ranges], [end for _, end in ranges]
        return self._try(lambda: list(self._fs.cat_ranges(paths, starts, ends, on_error="raise")))

    def write_bytes(self, data: bytes) -> None:
        """Write all of the file, by one request."""
        self._try(lambda: self._fs.pipe_file(self._path, data))

    def upload(self, local: Path) -> None:
        """Copy a local file here."""
        self._try(lambda: self._fs.put_file(str(local), self._path))

    def touch(self, exist_ok: bool = True) -> None:
        """Make an empty file."""
        if not exist_ok and self.exists():
            raise FileExistsError(errno.EEXIST, "it exists", str(self))
        self.write_bytes(b"")

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove the file."""
        try:
            self._try(lambda: self._fs.rm_file(self._path))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Make the folder, where the file system has folders."""
        self._try(lambda: self._fs.makedirs(self._path, exist_ok=exist_ok))

    def rmdir(self) -> None:
        """Remove the folder if it is empty, where the file system has folders; never a bucket."""
        if "/" in self._path.strip("/"):
            self._try(lambda: self._fs.rmdir(self._path))

    def _try(self, run: Callable[[], _T]) -> _T:
        try:
            self._fs.invalidate_cache()  # other ranks write, too
            return run()
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, "there is no such file", str(self)) from error
        except Exception as error:  # backends raise those of their libraries
            text = named(error)
            raise OSError(getattr(error, "errno", None) or errno.EIO, text, str(self)) from error


AnyPath = Path | RemotePath


def as_path(path: str | Path) -> AnyPath:
    """A local path, or one of fsspec where there is a protocol: ``s3://bucket/run``.

    Raises:
        ConfigError: it is no path, the protocol is unknown, or its package is not installed.
    """
    require_path(path)
    text = str(path)
    for prefix in _LOCAL:
        if text.startswith(prefix):
            return Path(text.removeprefix(prefix))
    if isinstance(path, Path) or "://" not in text:
        return Path(path)
    try:
        file_system, inner = fsspec.core.url_to_fs(text)
    except ImportError as error:
        raise ConfigError(
            f"{text} needs a package that is not installed: {text_of(error)}. Install it with pip, or pass a local "
            "path."
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{text} cannot be used: {text_of(error)}. Pass a local path, or a protocol of fsspec."
        ) from error
    return RemotePath(file_system, str(inner))


def absolute(path: AnyPath) -> AnyPath:
    """A path that other processes find, too."""
    return path.absolute() if isinstance(path, Path) else path


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


def sync_path(path: AnyPath) -> None:
    """Sync a local file, or a folder's entries, to disk."""
    if isinstance(path, Path):
        sync(path)


def dangling_link(path: AnyPath) -> str | None:
    """The link in a path whose target is not there, in words: a disk that is not mounted; None: there is none."""
    for one in (path, *path.parents) if isinstance(path, Path) else ():
        if one.is_symlink() and not os.path.exists(one):
            return f"{one} is a link to {os.readlink(one)}, which does not exist (a disk that is not mounted?)"
    return None
