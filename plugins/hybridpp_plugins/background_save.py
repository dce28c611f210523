"""Write a checkpoint while training goes on: threads that exchange what they wrote through the checkpoint's folder.

Nothing is communicated between ranks until :meth:`BackgroundSave.wait`, so a step never meets a message of a save. When
its data are on disk, each rank's thread leaves a file that describes them; rank 0's thread reads these and commits.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridpp.checkpoint.commit import part_file
from hybridpp.checkpoint.writer import Holding, WrittenFiles, remove
from hybridpp.errors import CheckpointError

_POLL_S = 0.02
_TIMEOUT_S = 600.0


class BackgroundSave:
    """A save that is under way on this rank.

    Args:
        rank: of the world.
        size: of the world.
        folder: of the checkpoint.
        save_id: of the save.
        write: writes copies in host memory to files, given the first part of their names.
        described: what the rank contributes, given what it wrote.
        commit: called on rank 0 with what all ranks wrote and contribute, by rank.

    Attributes:
        failure: why it failed on this rank; None: it has not, so far, or another rank did.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        folder: Path,
        save_id: str,
        write: Callable[[str], WrittenFiles],
        described: Callable[[WrittenFiles], Mapping[str, Any]],
        commit: Callable[[Sequence[Mapping[str, Any]]], None],
    ):
        self._rank, self._size, self._folder, self._save_id = rank, size, folder, save_id
        self._write: Callable[[str], WrittenFiles] | None = write
        self._described, self._commit = described, commit
        self.written = WrittenFiles({}, {})
        self.failure: Exception | None = None
        self._cancelled = threading.Event()
        # No daemon: a script that ends waits for its last checkpoint.
        self._thread = threading.Thread(target=self._run, name=f"hybridpp save {save_id}")
        self._thread.start()

    def join(self) -> None:
        """Wait for this rank's thread; nothing is communicated."""
        self._thread.join()

    def cancel(self) -> None:
        """Let rank 0 wait no longer for ranks that have not said that they failed."""
        self._cancelled.set()

    def _run(self) -> None:
        try:
            assert self._write is not None
            self.written = self._write(f"rank-{self._rank:05d}.{self._save_id}")
            self._write = None  # it holds the copies
            self._leave(self._described(self.written))
            if self._rank == 0:
                self._commit(self._collect())
                remove(part_file(self._folder, self._save_id, rank) for rank in range(self._size))
        except _CancelledSave:
            self._write = None
        except Exception as error:
            self.failure = error
            self._write = None
            self._leave_failure(error)

    def _leave(self, part: Mapping[str, Any]) -> None:
        path = part_file(self._folder, self._save_id, self._rank)
        temporary = path.with_suffix(".json.tmp")
        temporary.write_text(json.dumps(part))
        os.replace(temporary, path)

    def _leave_failure(self, error: Exception) -> None:
        try:
            self._leave({"failure": str(error)})
        except OSError:
            return  # on a full disk; the other ranks learn of it when they wait

    def _collect(self) -> list[Mapping[str, Any]]:
        parts: list[Mapping[str, Any]] = []
        deadline = time.monotonic() + _TIMEOUT_S
        while len(parts) < self._size:
            path = part_file(self._folder, self._save_id, len(parts))
            if not path.exists():
                if time.monotonic() > deadline:
                    raise CheckpointError(f"rank {len(parts)} has not written its part in {_TIMEOUT_S:.0f} s")
                if self._cancelled.wait(_POLL_S):
                    raise _CancelledSave
                continue
            parts.append(json.loads(path.read_text()))
            if "failure" in parts[-1]:
                raise CheckpointError(f"rank {len(parts) - 1} failed: {parts[-1]['failure']}")
        return parts


class _CancelledSave(Exception):
    """Another rank failed, and has said so by other means."""


def host_copies(holdings: Sequence[Holding]) -> list[Holding]:
    """Copies that do not change with the run, in host memory."""
    return [
        holding._replace(parts=[(box, view.detach().to("cpu", copy=True)) for box, view in holding.parts])
        for holding in holdings
    ]
