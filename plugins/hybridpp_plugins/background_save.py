"""Write a checkpoint while training goes on: threads that exchange what they wrote through the checkpoint's folder.

The threads send nothing, so a step never meets a message of a save. When its data are on disk, each rank's thread
leaves a file that describes them; rank 0's thread reads these and commits. How far each rank is, is a number in its
message at the end of a step (:class:`SaveStatus`), so all ranks learn of the end of a save in the same step.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol, cast

from hybridpp.checkpoint.commit import part_file
from hybridpp.checkpoint.manifest import MOST_BYTES
from hybridpp.checkpoint.pace import Pace, processors
from hybridpp.checkpoint.remote_path import AnyPath, RemotePath
from hybridpp.checkpoint.schema import read_json
from hybridpp.checkpoint.writer import WrittenFiles, remove
from hybridpp.cluster import Awaited
from hybridpp.errors import CheckpointError

_POLL_S, _REMOTE_POLL_S = 0.02, 0.5
_TIMEOUT_S = 600.0
_NICENESS = 19
# Of the processors that a rank has: what a step beside a save loses then is mostly the disk's (benchmarks/RESULTS.md).
_SHARE = 0.0075


class SaveOutcome(IntEnum):
    """How far a save in the background is on a rank."""

    NONE = 0
    DONE = 1
    FAILED = 2


class Background(Protocol):
    """A save in the background, on one rank.

    Attributes:
        outcome: how far this rank is.
    """

    outcome: SaveOutcome

    def hurry(self) -> None:
        """Let this rank's thread work as fast as it can, because the script waits for it."""

    def join(self) -> None:
        """Wait for this rank's thread; nothing is communicated."""

    def cancel(self) -> None:
        """Let this rank wait no longer for others."""

    def awaited(self) -> Awaited | None:
        """What this rank's thread waits for; None: no rank."""


class SaveStatus:
    """What the ends of steps tell of the save that is under way.

    Attributes:
        current: that save on this rank; None: there is none.
        is_decided: whether it is done on all ranks, or failed on any; the same on every rank.
    """

    def __init__(self) -> None:
        self.current: Background | None = None
        self.is_decided = False

    def heard(self, outcomes: Sequence[float]) -> None:
        """Take over how far each rank was in the last step."""
        self.is_decided = SaveOutcome.FAILED in outcomes or all(one == SaveOutcome.DONE for one in outcomes)


class SavingRank(NamedTuple):
    """A rank that saves.

    Attributes:
        rank: of the world.
        size: of the world.
        ranks_of_host: how many share the host's processors.
    """

    rank: int
    size: int
    ranks_of_host: int

    def pace(self) -> Pace:
        """That of a thread of this rank beside training."""
        return Pace(_SHARE * processors() / self.ranks_of_host)


class BackgroundSave:
    """A save that is under way on this rank.

    Args:
        saving: this rank.
        folder: of the checkpoint.
        save_id: of the save.
        write: writes copies in host memory to files, given the first part of their names and what it calls after each
            few megabytes.
        described: what the rank contributes, given what it wrote.
        commit: called on rank 0 with what all ranks wrote and contribute, by rank.
        is_lost: whether a rank of the job is gone, which will write nothing more.

    Attributes:
        outcome: how far this rank is; on rank 0, it is done when the checkpoint counts.
        failure: why it failed on this rank; None: it has not, so far, or another rank did.
    """

    def __init__(
        self,
        saving: SavingRank,
        folder: AnyPath,
        save_id: str,
        write: Callable[[str, Callable[[], None]], WrittenFiles],
        described: Callable[[WrittenFiles], Mapping[str, Any]],
        commit: Callable[[Sequence[Mapping[str, Any]]], None],
        is_lost: Callable[[], bool] = lambda: False,
    ):
        self._rank, self._size = saving.rank, saving.size
        self._folder, self._save_id, self._pace = folder, save_id, saving.pace()
        self._write: Callable[[str, Callable[[], None]], WrittenFiles] | None = write
        self._described, self._commit, self._is_lost = described, commit, is_lost
        self.written = WrittenFiles({}, {})
        self.outcome = SaveOutcome.NONE
        self.failure: Exception | None = None
        self._cancelled = threading.Event()
        self._missing: int | None = None
        # No daemon: a script that ends waits for its last checkpoint.
        self._thread = threading.Thread(target=self._run, name=f"hybridpp save {save_id}")
        self._thread.start()

    def hurry(self) -> None:
        """Let the thread work as fast as it can."""
        self._pace.hurry()

    def join(self) -> None:
        """Wait for this rank's thread; nothing is communicated."""
        self._thread.join()

    def cancel(self) -> None:
        """Let rank 0 wait no longer for ranks that have not said that they failed."""
        self._cancelled.set()

    def awaited(self) -> Awaited | None:
        """What this rank's thread waits for; None: no rank."""
        missing = self._missing
        return None if missing is None else Awaited("the part of a save", (missing,), "")

    def _run(self) -> None:
        yield_to_training()
        self._pace.begin()
        try:
            assert self._write is not None
            self.written = self._write(f"rank-{self._rank:05d}.{self._save_id}", self._pace.rest)
            self._write = None  # it holds the copies
            self._leave(self._described(self.written))
            if self._rank == 0:
                self._commit(self._collect())
                remove(part_file(self._folder, self._save_id, rank) for rank in range(self._size))
            self.outcome = SaveOutcome.DONE
        except _CancelledSave:
            self._write = None
        except Exception as error:
            self.failure = error
            self._write = None
            self._leave_failure(error)
            self.outcome = SaveOutcome.FAILED

    def _leave(self, part: Mapping[str, Any]) -> None:
        path = part_file(self._folder, self._save_id, self._rank)
        if isinstance(path, RemotePath):
            path.write_bytes(json.dumps(part).encode())
            return
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
        deadline, seen = time.monotonic() + _TIMEOUT_S, 0
        while len(parts) < self._size:
            path = part_file(self._folder, self._save_id, len(parts))
            if not path.exists():
                self._missing = len(parts)
                if time.monotonic() > deadline:
                    seen, before = self._size_of(len(parts)), seen
                    if seen == before:
                        raise CheckpointError(f"rank {len(parts)} has written nothing for {_TIMEOUT_S:.0f} s")
                    deadline = time.monotonic() + _TIMEOUT_S
                if self._is_lost() and not path.exists():
                    raise _CancelledSave
                if self._cancelled.wait(_REMOTE_POLL_S if isinstance(path, RemotePath) else _POLL_S):
                    raise _CancelledSave
                continue
            self._missing = None
            parts.append(_left_part(path))
            if "failure" in parts[-1]:
                raise CheckpointError(f"rank {len(parts) - 1} failed: {parts[-1]['failure']}")
            deadline, seen = time.monotonic() + _TIMEOUT_S, 0
        return parts

    def _size_of(self, rank: int) -> int:
        """Bytes that a rank has written so far."""
        prefix = f"rank-{rank:05d}.{self._save_id}."
        return sum(file.stat().st_size for file in self._folder.iterdir() if file.name.startswith(prefix))


def _left_part(path: AnyPath) -> Mapping[str, Any]:
    """What a rank says of its part.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        found = read_json(path, MOST_BYTES)
    except ValueError as error:
        raise CheckpointError(f"{path}, which a rank wrote, cannot be read: {error}") from error
    return cast("Mapping[str, Any]", found)


def yield_to_training() -> None:
    """Let this thread run where others of the host leave time: a step waits for the slowest rank."""
    if sys.platform == "linux":  # elsewhere it would be the process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


class _CancelledSave(Exception):
    """Another rank failed, and has said so by other means."""
