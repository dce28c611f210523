"""Notes that ranks leave for ``hybridpp run``, which reads them when its job has ended.

They are small files in a folder that it makes and removes. Without that launcher there is no folder, and no note.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path

_BEGUN, _ENDED, _MARKER = "begun", "ended", "marker"


class LauncherNotes:
    """The notes of one rank.

    Args:
        folder: of all ranks of the host; None: nobody reads notes.
        local_rank: this process among those of its host.
    """

    def __init__(self, folder: Path | None = None, local_rank: int = 0):
        self._folder, self._local_rank = folder, local_rank

    def clear(self) -> None:
        """Remove what this rank left in an earlier attempt of the job."""
        if self._folder is not None:
            for kind in (_BEGUN, _ENDED, _MARKER):
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


def num_ended(folder: Path) -> int:
    """How many ranks left the job without an error."""
    return len(list(folder.glob(f"{_ENDED}-*")))


def markers(folder: Path) -> Sequence[str]:
    """The paths, or URLs, that exist if a checkpoint of the stopped job counts."""
    texts = (path.read_text() for path in sorted(folder.glob(f"{_MARKER}-*")))
    return list(dict.fromkeys(text for text in texts if text))
