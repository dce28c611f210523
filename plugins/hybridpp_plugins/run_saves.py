"""A run as a checkpoint: its models, the script's own values, and random generators."""

from collections.abc import Mapping, Sequence
from typing import Any

from hybridpp.checkpoint.commit import committed_steps, remove_old
from hybridpp.checkpoint.manifest import Manifest
from hybridpp.checkpoint.plain_values import encode
from hybridpp.checkpoint.remote_path import AnyPath, absolute
from hybridpp.checkpoint.stop_marker import marker_path, remove_marker, write_marker
from hybridpp.checkpoint.writer import Holding
from hybridpp.cluster import generator_states, get_dist_logger
from hybridpp_plugins.training_state import RunParts, TrainingState, merged_states


class RunContents:
    """What a save of a run writes, on one rank. Collective: all ranks must make it.

    Args:
        parts: what belongs to each model of the job.
        path: the folder of the run's checkpoints.
        step: of the run.
        extras: values of the script; those of rank 0 are kept.
        keep_last: how many checkpoints stay; None: all.
        reported: folders of whose later checkpoints the script was told; this save may add its own.
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
            CheckpointError: a state cannot be put together from the ranks' parts.
        """
        for state in self._states:
            state.check_can_save()
        return {
            "models": [state.described() for state in self._states],
            "extras": encode(dict(self._extras), "extras"),
            "generators": encode(generator_states(self._device), "generators"),
            "dp": self._layout.here.dp,
        }

    def holdings(self) -> list[Holding]:
        """The tensors that this rank writes."""
        return [holding for state in self._states for holding in state.holdings()]

    def state(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The state of the manifest, from what the ranks described."""
        models = [merged_states([row["models"][index] for row in rows]) for index in range(len(self._states))]
        generators = [row["generators"] for row in rows]
        distinct = [state for n, state in enumerate(generators) if state not in generators[:n]]
        return {
            "models": models,
            "extras": rows[0]["extras"],
            "generators": {"states": distinct, "of_ranks": [distinct.index(state) for state in generators]},
            "replicas_of_ranks": [row["dp"] for row in rows],
        }

    def after_commit(self, folder: AnyPath, manifest: Manifest) -> list[str]:
        """Say whether the run was told to stop, and remove older checkpoints; returns what could not be done."""
        path, problems = self._path, []
        try:
            if self._stop_signal:
                write_marker(path, self.step, self._stop_signal)
            else:
                remove_marker(path)
        except OSError as error:
            problems.append(str(error))
        later = [step for step in committed_steps(path) if step > manifest.step]
        if later and str(path) not in self._reported:
            self._reported.add(str(path))
            get_dist_logger().warning(
                f"step {manifest.step} was saved to {path}, which holds later steps, {sorted(later)}: booster.resume "
                "takes the newest that is intact. If they are of another run, remove them or pass another path."
            )
        return [*problems, *remove_old(path, manifest, self._keep_last)]
