"""Save to a folder that counts from one moment, at once or in the background: of whatever, from all ranks."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from hybridpp.checkpoint.commit import begin_in, commit_in, is_committed, new_save_id, part_file, token_file
from hybridpp.checkpoint.file_images import FileImage, file_images, write_images
from hybridpp.checkpoint.gather import gather_json
from hybridpp.checkpoint.manifest import FileEntry, Manifest, check, merged, tensor_as_json
from hybridpp.checkpoint.remote_path import AnyPath, dangling_link
from hybridpp.checkpoint.writer import FILE_BYTES, Holding, WrittenFiles, remove, write_holdings
from hybridpp.cluster import gather_objects, get_dist_logger
from hybridpp.errors import CheckpointError, DeadlockError, PeerError, text_of
from hybridpp_plugins.agreement import agree
from hybridpp_plugins.background_save import Background, BackgroundSave, SaveOutcome, SaveStatus, SavingRank
from hybridpp_plugins.layout import Layout


class SavedContents(Protocol):
    """What a save writes, on one rank.

    Attributes:
        call: of the booster that saves, such as ``"booster.save"``.
        step: of the run.
        zero_stage: of the model, for people.
    """

    call: str
    step: int
    zero_stage: int

    def check(self) -> None:
        """Refuse what cannot be saved, on all ranks alike. Collective: all ranks."""

    def described(self) -> dict[str, Any]:
        """What this rank contributes besides tensors, as JSON; refuses what cannot be saved."""

    def holdings(self) -> list[Holding]:
        """The tensors that this rank writes."""

    def state(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The state of the manifest, from what the ranks described."""

    def after_commit(self, folder: AnyPath, manifest: Manifest) -> Sequence[str]:
        """What is left to do beside the checkpoint, on rank 0; returns what could not be done."""


class FolderSave:
    """One save, on one rank. Collective: all ranks call every method, in order.

    Args:
        layout: the ranks.
        folder: to write to.
        contents: what is written.
        file_bytes: the most that a file holds.
    """

    def __init__(self, layout: Layout, folder: AnyPath, contents: SavedContents, file_bytes: int = FILE_BYTES):
        self._layout, self._control = layout, layout.control
        self._folder, self._contents, self._file_bytes = folder, contents, file_bytes
        self._call = f"in {contents.call}"
        self._save_id, self._ranks_of_host = "", 1
        self._written = WrittenFiles({}, {})
        self._described: dict[str, Any] = {}

    def begin(self) -> None:
        """Check what is saved before anything is written; then make the folder, which all ranks must see."""
        self._contents.check()
        failure: Exception | None = None
        try:
            self._described = self._contents.described()
        except Exception as error:
            failure = error
        self._agree(failure)
        self._attempt(self._make_folder)
        rows = gather_objects(self._control, self._call, [self._save_id, self._layout.world.local_rank])
        self._save_id, self._ranks_of_host = rows[0][0], 1 + max(local for _, local in rows)
        self._check_shared()

    def write(self) -> None:
        """Write this rank's tensors to new files, and let the checkpoint count."""
        self._attempt(self._write_tensors)
        rows = gather_json(self._control, self._call, self._part(self._written))
        manifests: list[Manifest] = []

        def run() -> None:
            if rows:
                manifests.append(self._manifest(rows))
                commit_in(self._folder, manifests[0])

        self._attempt(run)
        for manifest in manifests:
            self._after_commit(manifest)

    def start(self) -> "StartedSave":
        """Copy this rank's tensors to host memory, and write them while training goes on."""
        images: list[FileImage] = []

        def commit_rows(rows: Sequence[Mapping[str, Any]]) -> None:
            manifest = self._manifest(rows)
            commit_in(self._folder, manifest)
            self._after_commit(manifest)

        self._attempt(lambda: images.extend(file_images(self._contents.holdings(), self._file_bytes)))
        background = BackgroundSave(
            SavingRank(self._control.rank, self._control.size, self._ranks_of_host),
            self._folder,
            self._save_id,
            lambda prefix, after_block: write_images(self._folder, prefix, images, after_block),
            self._part,
            commit_rows,
            lambda: bool(self._layout.world.progress.lost),
        )
        self._layout.world.progress.in_background = background.awaited
        return StartedSave(background, lambda: self._finish(background))

    def _finish(self, background: BackgroundSave) -> None:
        """Wait for a save in the background; where it failed on any rank, it is removed and fails on all."""
        background.hurry()
        if self._control.rank:
            background.join()
        has_failed = any(gather_objects(self._control, self._call, background.failure is not None))
        if has_failed:
            background.cancel()
        background.join()
        self._written = background.written

        def reraise() -> None:
            if background.failure is not None:
                raise background.failure
            if not has_failed and background.outcome is not SaveOutcome.DONE:
                raise CheckpointError(
                    f"{self._folder} was given up when another rank was taken to be gone, so it does not count. Save "
                    "again."
                )

        self._attempt(reraise)

    def _make_folder(self) -> None:
        if self._control.rank == 0:
            save_id = new_save_id()
            begin_in(self._folder, save_id)
            self._save_id = save_id

    def _check_shared(self) -> None:
        """Check that all ranks see the token that rank 0 made. Collective: all ranks."""
        seen: list[bool] = []
        self._attempt(lambda: seen.append(self._has_token()))
        # The save of another job removes what looks incomplete to it, for rank 0 as well.
        self._attempt(lambda: None if self._control.rank else self._check_alone())
        self._attempt(lambda: self._require_shared(seen[0]))

    def _require_shared(self, sees_token: bool) -> None:
        if not sees_token:
            raise CheckpointError(
                f"{self._folder} is not the folder that rank 0 made: all ranks must write to one file system. Pass a "
                "path on a shared one."
            )

    def _has_token(self) -> bool:
        return token_file(self._folder, self._save_id).exists()

    def _check_alone(self) -> None:
        """Refuse to go on where the save of another job has removed this one's files.

        Raises:
            CheckpointError: it has.
        """
        if not self._has_token():
            raise CheckpointError(
                f"another save to {self._folder.parent} ran at the same time, and removed what this one had written: "
                f"{self._folder}. Let only one job save to a folder; earlier checkpoints are as they were."
            )

    def _write_tensors(self) -> None:
        prefix = f"rank-{self._layout.world.rank:05d}.{self._save_id}"
        self._written = write_holdings(self._folder, prefix, self._contents.holdings(), self._file_bytes)

    def _part(self, written: WrittenFiles) -> dict[str, Any]:
        """What this rank contributes, as JSON."""
        files = {name: list(entry) for name, entry in written.files.items()}
        tensors = {key: tensor_as_json(entry) for key, entry in written.tensors.items()}
        return {**self._described, "files": files, "tensors": tensors}

    def _manifest(self, rows: Sequence[Mapping[str, Any]]) -> Manifest:
        grid = self._layout.grid
        manifest = Manifest(
            save_id=self._save_id,
            step=self._contents.step,
            layout={
                "dp_size": grid.dp_size,
                "pp_size": grid.pp_size,
                "tp_size": grid.tp_size,
                "zero_stage": self._contents.zero_stage,
            },
            files={name: FileEntry(*entry) for row in rows for name, entry in row["files"].items()},
            tensors=merged(item for row in rows for item in row["tensors"].items()),
            state=self._contents.state(rows),
            saved_at=int(time.time()),
        )
        check(manifest)
        return manifest

    def _after_commit(self, manifest: Manifest) -> None:
        remove([token_file(self._folder, self._save_id)])
        for problem in self._contents.after_commit(self._folder, manifest):
            get_dist_logger().warning(f"beside the checkpoint, something could not be written or removed: {problem}.")

    def _attempt(self, run: Callable[[], None]) -> None:
        """Run it, and agree; where it fails on any rank, remove what this rank wrote."""
        failure: Exception | None = None
        try:
            run()
        except OSError as error:
            failure = self._explained(error)
        except Exception as error:
            failure = error
        try:
            self._agree(failure)
        except Exception:
            self._discard()
            raise

    def _explained(self, error: OSError) -> CheckpointError:
        """An error of the file system, with advice."""
        text = ""
        if isinstance(error, FileNotFoundError) and self._save_id:
            try:
                self._check_alone()
            except CheckpointError as other:
                text = str(other)
        why = dangling_link(self._folder) or error.strerror or text_of(error)
        failure = CheckpointError(
            text
            or f"{self._folder} cannot be written: {why}. Free space, or pass another path; earlier checkpoints are "
            "as they were, and so is the run."
        )
        failure.__cause__ = error
        return failure

    def _discard(self) -> None:
        if self._save_id and is_committed(self._folder, self._save_id):
            return  # what failed came after
        remove([self._folder / name for name in self._written.files])
        if self._control.rank == 0 and self._save_id:
            remove([token_file(self._folder, self._save_id)])
            remove(part_file(self._folder, self._save_id, rank) for rank in range(self._control.size))
            try:
                self._folder.rmdir()  # where it is empty
            except OSError:
                return

    def _agree(self, failure: Exception | None) -> None:
        agree(self._control, self._call, failure, "saving a checkpoint")


class StartedSave(NamedTuple):
    """A save that is under way.

    Attributes:
        background: what runs on this rank.
        finish: waits for it, and raises on all ranks what made it fail on one. Collective: all ranks.
    """

    background: Background
    finish: Callable[[], None]


class Saves:
    """The saves of a plugin: at most one is under way.

    Attributes:
        status: of that one.
        reported: what the script was told of folders of checkpoints, once.
    """

    def __init__(self) -> None:
        self.reported = set[str]()
        self.status = SaveStatus()
        self._finish: Callable[[], None] | None = None

    def run(self, save: FolderSave, *, asynchronous: bool) -> None:
        """Save, or begin to. Collective: all ranks, after :meth:`wait`."""
        save.begin()
        if asynchronous:
            self.add(save.start())
        else:
            save.write()

    def add(self, started: StartedSave) -> None:
        """Note what is under way. All ranks, after :meth:`wait`."""
        self.status.current, self._finish = started

    def wait(self) -> None:
        """See :meth:`hybridpp.Booster.wait_for_save`. Collective: all ranks, if a save is under way."""
        if self._finish is None:
            return
        try:
            self._finish()
        except (PeerError, DeadlockError):
            self.give_up()
            raise
        finally:
            self.status.current, self.status.is_decided, self._finish = None, False, None

    def give_up(self) -> None:
        """A peer is gone: wait no longer for what it would write, so that this process can end."""
        if self.status.current is not None:
            self.status.current.cancel()
