"""A run as a checkpoint: its models, the script's own values, and random generators."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridpp.checkpoint.commit import committed_steps, refuse_link, remove_old, step_folder
from hybridpp.checkpoint.digest import new_digest
from hybridpp.checkpoint.manifest import Manifest
from hybridpp.checkpoint.plain_values import encode
from hybridpp.checkpoint.reader import read_manifest
from hybridpp.checkpoint.remote_path import AnyPath, absolute
from hybridpp.checkpoint.stop_marker import marker_path, remove_marker, write_marker
from hybridpp.checkpoint.writer import Holding
from hybridpp.cluster import generator_states, get_dist_logger
from hybridpp.errors import CheckpointError, some_of, text_of
from hybridpp_plugins.training_state import RunParts, TrainingState, merged_states

# Names of extras that ranks compare one by one.
_MOST_COMPARED = 100


class RunContents:
    """What a save of a run writes, on one rank. Collective: all ranks must make it.

    Args:
        parts: what belongs to each model of the job.
        path: the folder of the run's checkpoints.
        step: of the run.
        extras: values of the script; those of rank 0 are kept.
        keep_last: how many checkpoints stay; None: all.
        reported: what the script was told of folders; this save may add to it.
    """

    call = "booster.save"

    def __init__(
        self,
        parts: Sequence[RunParts],
        path: AnyPath,
        step: int,
        extras: Mapping[str, Any],
        keep_last: int | None,
        reported: set[str],
    ):
        engine = parts[0].engine
        stop = engine.layout.world.stop
        self._path, self._stop_signal = path, stop.agreed
        if stop.agreed:
            stop.notes.will_mark(marker_path(absolute(path)))
        self.step, self.zero_stage = step, engine.zero_stage
        self._layout, self._device = engine.layout, engine.device
        self._extras, self._keep_last, self._reported = extras, keep_last, reported
        if engine.layout.world.rank == 0 and any(part.has_other_loader for part in parts):
            self._tell_once(
                "position in the data",
                "the dataloader that boost was given is not one of plugin.prepare_dataloader, so the checkpoint has no "
                "position in the data. Keep it in extras, or use plugin.prepare_dataloader.",
            )
        self._states = [
            TrainingState(part, index, f"in {self.call}", compares=True) for index, part in enumerate(parts)
        ]

    def check(self) -> None:
        """Refuse weights without values. Collective: all ranks."""
        for state in self._states:
            state.engine.original.uninitialized.check(self._layout.control)

    def described(self) -> dict[str, Any]:
        """What this rank contributes besides tensors.

        Raises:
            ConfigError: gradients are held, or something is an object.
            CheckpointError: a state cannot be put together from the ranks' parts, or the step is one of other models.
        """
        for state in self._states:
            state.check_can_save()
        if self._layout.world.rank == 0:
            self._use_folder()
            self._refuse_other_models()
        extras = encode(dict(self._extras), "extras")
        return {
            "models": [state.described() for state in self._states],
            "extras": extras if self._layout.world.rank == 0 else None,
            "digests of extras": _digests(extras),
            "generators": encode(generator_states(self._device), "generators"),
            "dp": self._layout.here.dp,
        }

    def _use_folder(self) -> None:
        if isinstance(self._path, Path):
            self._layout.world.stop.notes.use(self._path)

    def _refuse_other_models(self) -> None:
        """Refuse to replace what another booster saved, as where each of two models has one."""
        folder = step_folder(self._path, self.step)
        refuse_link(folder)
        try:
            models = read_manifest(folder).state.get("models", [])
        except CheckpointError:
            return  # there is none, or it is damaged
        there = [model["class"] for model in models if "imported_from" not in model]
        here = [type(state.engine.model).__name__ for state in self._states]
        if there and there != here:
            raise CheckpointError(
                f"{folder} is a checkpoint of {', '.join(there)}, and this booster saves {', '.join(here)}: it is not "
                "replaced. Pass another path, one for each booster and each run."
            )

    def holdings(self) -> list[Holding]:
        """The tensors that this rank writes."""
        if self._layout.world.rank == 0:
            self._use_folder()  # now that it is there
        return [holding for state in self._states for holding in state.holdings()]

    def state(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The state of the manifest, from what the ranks described."""
        models = [merged_states([row["models"][index] for row in rows]) for index in range(len(self._states))]
        generators = [row["generators"] for row in rows]
        distinct = [state for n, state in enumerate(generators) if state not in generators[:n]]
        self._tell_of_other_extras([row["digests of extras"] for row in rows])
        return {
            "models": models,
            "extras": rows[0]["extras"],
            "generators": {"states": distinct, "of_ranks": [distinct.index(state) for state in generators]},
            "replicas_of_ranks": [row["dp"] for row in rows],
        }

    def _tell_of_other_extras(self, rows: Sequence[Mapping[str, str]]) -> None:
        """Warn once of extras that are not alike on all ranks."""
        differing = sorted({key for row in rows for key in {*row, *rows[0]} if row.get(key) != rows[0].get(key)})
        if differing:
            self._tell_once(
                "extras",
                f"the ranks gave different extras to booster.save: {', '.join(differing[:8])}. The checkpoint keeps "
                "those of rank 0, and booster.resume gives them to all. To keep values of each rank, gather them, and "
                "pass all of them on every rank.",
            )

    def _tell_once(self, what: str, text: str) -> None:
        """Warn once for each folder of checkpoints."""
        if (topic := f"{what} in {self._path}") not in self._reported:
            self._reported.add(topic)
            get_dist_logger().warning(text)

    def after_commit(self, folder: AnyPath, manifest: Manifest) -> list[str]:
        """Say whether the run was told to stop, and remove older checkpoints; returns what could not be done."""
        path, problems = self._path, []
        try:
            if self._stop_signal:
                self._layout.world.stop.notes.saved()
                write_marker(path, self.step, self._stop_signal)
            else:
                remove_marker(path)
        except OSError as error:
            problems.append(text_of(error))
        later = [step for step in committed_steps(path) if step > manifest.step]
        if later:
            self._tell_once(
                "later steps",
                f"step {manifest.step} was saved to {path}, which holds later steps, {some_of(sorted(later))}: "
                "booster.resume takes the newest that is intact. If they are of another run, remove them or pass "
                "another path.",
            )
        return [*problems, *remove_old(path, manifest, self._keep_last)]


def _digests(extras: Any) -> dict[str, str]:
    """Digests of values of the script by their names; of very many, one of all."""
    pairs = list(extras["$dict"] if "$dict" in extras else extras.items())
    if len(pairs) > _MOST_COMPARED:
        pairs = [("all of them", pairs)]
    return {str(key): _digest(value) for key, value in pairs}


def _digest(value: Any) -> str:
    digest = new_digest()
    digest.update(json.dumps(value).encode())
    return digest.hexdigest()
