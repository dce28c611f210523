"""Save a run to a checkpoint, at once or in the background."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridpp.checkpoint.commit import (
    begin,
    commit,
    is_committed,
    new_save_id,
    part_file,
    remove_old,
    step_folder,
    token_file,
)
from hybridpp.checkpoint.gather import gather_json
from hybridpp.checkpoint.manifest import FileEntry, Manifest, check, merged, tensor_as_json
from hybridpp.checkpoint.plain_values import encode
from hybridpp.checkpoint.writer import Holding, WrittenFiles, remove, write_holdings
from hybridpp.cluster import gather_objects, generator_states, get_dist_logger
from hybridpp.errors import CheckpointError
from hybridpp_plugins.agreement import agree
from hybridpp_plugins.background_save import BackgroundSave, host_copies
from hybridpp_plugins.training_state import RunParts, TrainingState, merged_states

_SAVE = "in booster.save"


class _Save:
    """One save, on one rank. Collective: all ranks call every method, in order.

    Args:
        parts: what belongs to each model of the job.
        path: the folder of checkpoints.
        step: of the run.
    """

    def __init__(self, parts: Sequence[RunParts], path: Path, step: int):
        self._layout = parts[0].engine.layout
        self._control = self._layout.control
        self._path, self._step = path, step
        self._states = [TrainingState(part, index, _SAVE, compares=True) for index, part in enumerate(parts)]
        self._device = parts[0].engine.device
        self._save_id = ""
        self._written = WrittenFiles({}, {})

    def describe(self, extras: Mapping[str, Any]) -> dict[str, Any]:
        """What this rank contributes besides tensors; refuses what cannot be saved, before anything is written."""
        failure: Exception | None = None
        described: dict[str, Any] = {}
        for state in self._states:
            state.engine.original.uninitialized.check(self._control)
        try:
            for state in self._states:
                state.check_can_save()
            described = {
                "models": [state.described() for state in self._states],
                "extras": encode(dict(extras), "extras"),
                "generators": encode(generator_states(self._device), "generators"),
                "dp": self._layout.here.dp,
            }
        except Exception as error:
            failure = error
        self._agree(failure)
        return described

    def begin(self) -> None:
        """Make the folder, which all ranks must see."""
        self._attempt(self._begin)
        (self._save_id, *_) = gather_objects(self._control, _SAVE, self._save_id)
        self._attempt(self._check_shared)

    def write(self) -> None:
        """Write this rank's tensors to new files."""
        self._attempt(self._write_tensors)

    def start(self, described: dict[str, Any], keep_last: int | None) -> BackgroundSave:
        """Copy this rank's tensors to host memory, and write them while training goes on."""
        copies: list[Holding] = []

        def copy() -> None:
            copies.extend(host_copies(self._holdings()))

        def commit_rows(rows: Sequence[Mapping[str, Any]]) -> None:
            manifest = self._manifest(rows)
            commit(self._path, manifest)
            remove([token_file(self._folder, self._save_id)])
            remove_old(self._path, manifest, keep_last)

        self._attempt(copy)
        rank, size = self._control.rank, self._control.size
        return BackgroundSave(
            rank, size, self._folder, self._save_id, copies, lambda written: _part(described, written), commit_rows
        )

    def finish(self, background: BackgroundSave) -> None:
        """Wait for a save in the background; where it failed on any rank, it is removed and fails on all."""
        if self._control.rank:
            background.join()
        if any(gather_objects(self._control, _SAVE, background.failure is not None)):
            background.cancel()
        background.join()
        self._written = background.written

        def reraise() -> None:
            if background.failure is not None:
                raise background.failure

        self._attempt(reraise)

    def _begin(self) -> None:
        if self._control.rank == 0:
            save_id = new_save_id()
            begin(self._path, self._step, save_id)
            self._save_id = save_id

    @property
    def _folder(self) -> Path:
        return step_folder(self._path, self._step)

    def _check_shared(self) -> None:
        if not token_file(self._folder, self._save_id).exists():
            raise CheckpointError(
                f"{self._folder} is not the folder that rank 0 made: all ranks must write to one file system. Pass a "
                "path on a shared one."
            )

    def _write_tensors(self) -> None:
        prefix = f"rank-{self._layout.world.rank:05d}.{self._save_id}"
        self._written = write_holdings(self._folder, prefix, self._holdings())

    def _holdings(self) -> list[Holding]:
        return [holding for state in self._states for holding in state.holdings()]

    def commit(self, described: dict[str, Any]) -> Manifest | None:
        """Let the checkpoint count; returns its manifest on rank 0."""
        rows = gather_json(self._control, _SAVE, _part(described, self._written))
        manifest: list[Manifest] = []

        def run() -> None:
            if rows:
                manifest.append(self._manifest(rows))
                commit(self._path, manifest[0])

        self._attempt(run)
        if rows:
            remove([token_file(self._folder, self._save_id)])
        return manifest[0] if manifest else None

    def _manifest(self, rows: Sequence[Mapping[str, Any]]) -> Manifest:
        grid, engine = self._layout.grid, self._states[0].engine
        models = [merged_states([row["models"][index] for row in rows]) for index in range(len(self._states))]
        generators = [row["generators"] for row in rows]
        distinct = [state for n, state in enumerate(generators) if state not in generators[:n]]
        manifest = Manifest(
            save_id=self._save_id,
            step=self._step,
            layout={
                "dp_size": grid.dp_size,
                "pp_size": grid.pp_size,
                "tp_size": grid.tp_size,
                "zero_stage": engine.zero_stage,
            },
            files={name: FileEntry(*entry) for row in rows for name, entry in row["files"].items()},
            tensors=merged(item for row in rows for item in row["tensors"].items()),
            state={
                "models": models,
                "extras": rows[0]["extras"],
                "generators": {"states": distinct, "of_ranks": [distinct.index(state) for state in generators]},
                "replicas_of_ranks": [row["dp"] for row in rows],
            },
        )
        check(manifest)
        return manifest

    def _attempt(self, run: Callable[[], None]) -> None:
        """Run it, and agree; where it fails on any rank, remove what this rank wrote."""
        failure: Exception | None = None
        try:
            run()
        except OSError as error:
            failure = CheckpointError(
                f"{self._path} cannot be written: {error.strerror or error}. Free space, or pass another path; earlier "
                "checkpoints are as they were, and so is the run."
            )
            failure.__cause__ = error
        except Exception as error:
            failure = error
        try:
            self._agree(failure)
        except Exception:
            self._discard()
            raise

    def _discard(self) -> None:
        if self._save_id and is_committed(self._folder, self._save_id):
            return  # what failed came after
        written = [self._folder / name for name in self._written.files]
        remove(written)
        if self._control.rank == 0 and self._save_id:
            remove([token_file(self._folder, self._save_id)])
            remove(part_file(self._folder, self._save_id, rank) for rank in range(self._control.size))
            try:
                self._folder.rmdir()  # where it is empty
            except OSError:
                return

    def _agree(self, failure: Exception | None) -> None:
        agree(self._control, _SAVE, failure, "saving a checkpoint")


def _part(described: Mapping[str, Any], written: WrittenFiles) -> dict[str, Any]:
    """What a rank contributes to a checkpoint, as JSON."""
    files = {name: list(entry) for name, entry in written.files.items()}
    return {
        **described,
        "files": files,
        "tensors": {key: tensor_as_json(entry) for key, entry in written.tensors.items()},
    }


class RunSaves:
    """The saves of a plugin's runs: at most one is under way."""

    def __init__(self) -> None:
        self._pending: tuple[_Save, BackgroundSave] | None = None

    def save(
        self,
        parts: Sequence[RunParts],
        path: Path,
        *,
        step: int,
        extras: Mapping[str, Any],
        keep_last: int | None,
        asynchronous: bool,
    ) -> None:
        """See :meth:`hybridpp.Booster.save`. Collective: all ranks."""
        self.wait()
        save = _Save(parts, path, step)
        described = save.describe(extras)
        save.begin()
        if asynchronous:
            self._pending = (save, save.start(described, keep_last))
            return
        save.write()
        manifest = save.commit(described)
        if manifest is not None:
            for problem in remove_old(path, manifest, keep_last):
                get_dist_logger().warning(f"an older checkpoint could not be removed: {problem}.")

    def wait(self) -> None:
        """See :meth:`hybridpp.Booster.wait_for_save`. Collective: all ranks, if a save is under way."""
        if self._pending is not None:
            (save, background), self._pending = self._pending, None
            save.finish(background)
