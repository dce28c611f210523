"""Notes that ranks leave for ``hybridpp run``, which reads them when its job has ended, and for its next start.

They are small files in a folder that it makes and removes. Without that launcher there is no folder, and no note. Rank
0 holds the folder of its run open: the next start sees by that whether it has ended, in whatever way.
"""

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hybridpp.cluster.rank_process import ENDED, RankProcess, environment_of
from hybridpp.errors import CheckpointError

LAUNCHER = "HYBRIDPP_LAUNCHER"
"""The variable that tells ranks which process ``hybridpp run`` is."""

_LOGGER = logging.getLogger("hybridpp")
# For the last save of ranks whose launcher was killed.
_PATIENCE_S, _POLL_S = 240.0, 0.2
_BEGUN, _ENDED, _MARKER, _SAVED, _LAUNCHED = "begun", "ended", "marker", "saved", "launched"


class LauncherNotes:
    """The notes of one rank.

    Args:
        folder: of all ranks of the host; None: nobody reads notes.
        local_rank: this process among those of its host.
    """

    def __init__(self, folder: Path | None = None, local_rank: int = 0):
        self._folder, self._local_rank = folder, local_rank
        self._held: dict[tuple[int, int], int] = {}

    def use(self, folder: Path) -> None:
        """Before a run's folder is read or written: wait for ranks whose launcher was killed, which save to it and end.

        Args:
            folder: of the run; nothing is done where it is not there.

        Raises:
            CheckpointError: one of them did not end.
        """
        if self._folder is None or not folder.is_dir():
            return
        inode = _inode(folder)
        if inode in self._held:
            return
        until, is_told = time.monotonic() + _PATIENCE_S, False
        while users := [process for process in _orphans() if _holds(process.pid, inode)]:
            if time.monotonic() > until:
                raise CheckpointError(
                    f"{folder} is used by {users[0]}, a rank of a job whose launcher has ended, after {_PATIENCE_S:g} "
                    f"s. Two jobs may not write to one folder: end it (kill {users[0].pid}), or pass another path."
                )
            if not is_told:
                is_told = True
                _LOGGER.warning(
                    "%s is used by %s, a rank of a job whose launcher has ended: waits until it has saved and ended, "
                    "for at most %g s.",
                    *(folder, users[0], _PATIENCE_S),
                )
            time.sleep(_POLL_S)
        # Until this process ends; Python closes it in processes that it starts.
        self._held[inode] = os.open(folder, os.O_RDONLY)

    def launched(self) -> None:
        """This rank has called ``launch``: from now on it says in a line why it ends."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                # Torchrun starts each rank, of each attempt, in a group of processes of its own.
                _launched(self._folder, os.getpgrp()).touch()

    def clear(self) -> None:
        """Remove what this rank left in an earlier attempt of the job."""
        if self._folder is not None:
            for kind in (_BEGUN, _ENDED, _MARKER, _SAVED):
                self._path(kind).unlink(missing_ok=True)

    def step_done(self) -> None:
        """A step of training was done, which is lost if nothing saves it."""
        self._write(_BEGUN)

    def ended(self) -> None:
        """This rank left the job without an error."""
        self._write(_ENDED)

    def will_mark(self, path: object) -> None:
        """A checkpoint is being written because the job was told to stop; once it counts, ``path`` exists."""
        self._write(_MARKER, str(path))

    def saved(self) -> None:
        """That checkpoint counts, whether or not ``path`` could be written."""
        self._write(_SAVED)

    def _path(self, kind: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{kind}-{self._local_rank}"

    def _write(self, kind: str, text: str = "") -> None:
        # The launcher may have been killed, and its folder be gone.
        with contextlib.suppress(OSError):
            if self._folder is not None:
                self._path(kind).write_text(text)


def has_begun(folder: Path) -> bool:
    """Whether a rank has done a step since the job was started, the last time."""
    return any(folder.glob(f"{_BEGUN}-*"))


def has_launched(folder: Path, group: int) -> bool:
    """Whether a rank in this group of processes has called ``launch``."""
    return _launched(folder, group).exists()


def any_launched(folder: Path) -> bool:
    """Whether a rank has called ``launch`` since the job was started, the first time."""
    return any(folder.glob(f"{_LAUNCHED}-*"))


def num_ended(folder: Path) -> int:
    """How many ranks left the job without an error."""
    return len(list(folder.glob(f"{_ENDED}-*")))


def has_saved(folder: Path) -> bool:
    """Whether a rank of this host has written a checkpoint of the stopped job that counts."""
    return any(folder.glob(f"{_SAVED}-*"))


def markers(folder: Path) -> Sequence[str]:
    """The paths, or URLs, that exist if a checkpoint of the stopped job counts."""
    texts = (path.read_text() for path in sorted(folder.glob(f"{_MARKER}-*")))
    return list(dict.fromkeys(text for text in texts if text))


def _launched(folder: Path, group: int) -> Path:
    return folder / f"{_LAUNCHED}-{group}"


def _orphans() -> Iterator[RankProcess]:
    """Processes whose ``hybridpp run`` has ended, as far as this one may look."""
    for entry in Path("/proc").glob("[0-9]*"):
        given = environment_of(int(entry.name)).get(LAUNCHER)
        if given and int(entry.name) != os.getpid():
            with contextlib.suppress(ValueError, TypeError):
                if RankProcess(*json.loads(given)).condition == ENDED:
                    yield RankProcess.of(int(entry.name))


def _holds(pid: int, inode: tuple[int, int]) -> bool:
    """Whether a process has a folder open."""
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if _inode(descriptor) == inode:
                    return True
    return False


def _inode(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino
