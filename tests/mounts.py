"""Small and read-only disks: file systems that are mounted for one child of a test, and gone with it."""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import run_forked

CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_REC, MS_PRIVATE = 1, 32, 16384, 1 << 18
_NOT_MOUNTED = "this host allows no mounts"


def on_small_disk(path: Path, function: Callable[[], Any], size: str = "4m", timeout_s: float = 60.0) -> Any:
    """Call ``function`` in a forked child that alone sees a file system of ``size`` at ``path``; skips without mounts.

    Raises:
        RankFailed: with the child's traceback, or on a hang.
    """

    def child() -> tuple[str, Any]:
        try:
            _own_namespace()
            _mount(b"tmpfs", path, b"tmpfs", 0, f"size={size}".encode())
        except OSError as error:
            return f"{_NOT_MOUNTED}: {error}", None
        return "", function()

    reason, result = run_forked(child, timeout_s)
    if reason:
        pytest.skip(reason)
    return result


def make_read_only(path: Path) -> None:
    """Of a file system that :func:`on_small_disk` mounted."""
    _mount(None, path, None, MS_REMOUNT | MS_RDONLY, None)


def fill_disk(path: Path, num_left: int) -> Path:
    """The file that takes all of a disk but ``num_left`` bytes."""
    free = os.statvfs(path)
    file = path / "filler"
    file.write_bytes(bytes(free.f_bavail * free.f_frsize - num_left))
    return file


def _own_namespace() -> None:
    user, group = os.geteuid(), os.getegid()
    try:
        checked(libc().unshare(CLONE_NEWNS))
    except PermissionError:  # A user who may not mount is root in a namespace of its own, where the host has those.
        checked(libc().unshare(CLONE_NEWNS | CLONE_NEWUSER))
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _mount(None, Path("/"), None, MS_REC | MS_PRIVATE, None)


def _mount(source: bytes | None, path: Path, kind: bytes | None, flags: int, options: bytes | None) -> None:
    checked(libc().mount(source, os.fsencode(path), kind, ctypes.c_ulong(flags), options))


def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def checked(code: int) -> None:
    if code:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
