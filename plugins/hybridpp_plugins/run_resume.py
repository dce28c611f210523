"""Resume a run from the newest checkpoint that is intact."""

from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from hybridpp.checkpoint.commit import (
    committed_steps,
    open_step,
    step_folder,
)
from hybridpp.checkpoint.folder_kind import why_no_checkpoint
from hybridpp.checkpoint.manifest import Manifest
from hybridpp.checkpoint.plain_values import decode
from hybridpp.checkpoint.reader import fill
from hybridpp.checkpoint.remote_path import AnyPath, dangling_link
from hybridpp.checkpoint.stop_marker import remove_marker
from hybridpp.cluster import (
    Group,
    LauncherNotes,
    check_generator_states,
    gather_objects,
    get_dist_logger,
    set_generator_states,
)
from hybridpp.errors import CheckpointError, ConfigError, text_of
from hybridpp.plugin import Resumed
from hybridpp.saving import RUN_PARTS
from hybridpp_plugins.agreement import agree
from hybridpp_plugins.training_state import RunParts, TrainingState
from hybridpp_plugins.verified_folder import verified

_RESUME = "in booster.resume"


def resume_run(parts: Sequence[RunParts], path: AnyPath, *, start_fresh: bool, resumed: Collection[str]) -> Resumed:
    """See :meth:`hybridpp.Booster.resume`; ``resumed``: its ``parts``. Collective: all ranks."""
    engine = parts[0].engine
    control = engine.layout.control
    _refuse_unlike(gather_objects(control, _RESUME, sorted(resumed)))
    world = engine.layout.world
    manifest = _newest_intact(world.rank, control, path, start_fresh, world.stop.notes)
    if manifest is None:
        return Resumed()
    states = [TrainingState(part, index, _RESUME, compares=False, resumed=resumed) for index, part in enumerate(parts)]
    names = gather_objects(control, _RESUME, [state.group_names for state in states])
    folder = step_folder(path, manifest.step)
    failure: Exception | None = None
    stored: Sequence[Any] = manifest.state["models"]
    try:
        if len(stored) != len(states):
            there = ", ".join(model["class"] for model in stored)
            here = ", ".join(type(state.engine.model).__name__ for state in states)
            raise CheckpointError(
                f"it has the models {there}, and boosted here are {here}. Boost those of the run that saved it, in its "
                "order"
            )
        planned = [
            state.plan(manifest, stored[index], [row[index] for row in names]) for index, state in enumerate(states)
        ]
        has_generators = manifest.state["generators"] and "generators" in resumed
        generators = decode(_own_generators(manifest, parts[0])) if has_generators else None
        if generators is not None:
            check_generator_states(generators, engine.device)
        extras = decode(manifest.state["extras"]) if "extras" in resumed else {}
    except (CheckpointError, ConfigError) as error:
        failure = CheckpointError(f"{folder} does not fit this run: {text_of(error)}. Nothing was changed.")
    except Exception as error:
        failure = error
    _agree(control, failure)
    with ExitStack() as incomplete:
        for state in states:
            incomplete.enter_context(state.incomplete())
        try:
            fill(folder, [read for plan in planned for read in plan.reads])
        except Exception as error:
            failure = error
        _agree(control, failure)
    batches = 0
    try:
        done = [state.load(plan, saved) for state, plan, saved in zip(states, planned, stored, strict=True)]
        batches = done[0]
        if generators is not None:
            set_generator_states(generators, engine.device)
    except Exception as error:
        failure = error
    _agree(control, failure)
    position = planned[0].position
    _say_what_is_fresh(parts, resumed)
    return Resumed(manifest.step, 0 if position is None else position.epoch, batches, extras)


def _refuse_unlike(rows: Sequence[Sequence[str]]) -> None:
    """Refuse ranks that resume other parts.

    Raises:
        ConfigError: on every rank.
    """
    for rank, row in enumerate(rows):
        if row != rows[0]:
            raise ConfigError(
                f"all ranks must resume the same parts: rank 0 has parts={list(rows[0])}, rank {rank} "
                f"parts={list(row)}. Pass the same on every rank."
            )


def _say_what_is_fresh(parts: Sequence[RunParts], resumed: Collection[str]) -> None:
    """Tell which parts of the run, of those that it has, begin anew."""
    there = {
        "optimizer": any(part.engine.optimizer is not None for part in parts),
        "lr_scheduler": any(part.lr_scheduler is not None for part in parts),
        "dataloader": any(part.dataloader is not None for part in parts),
    }
    fresh = [name for name in RUN_PARTS if name not in resumed and there.get(name, True)]
    if fresh:
        get_dist_logger().info(f"not resumed, as parts= says: {', '.join(fresh)}.", ranks=[0])


def _newest_intact(
    rank: int, control: Group, path: AnyPath, start_fresh: bool, notes: LauncherNotes
) -> Manifest | None:
    """The manifest of the newest checkpoint that is intact; None: there is none at all, which is right.

    Raises:
        CheckpointError: there is none, or none that is intact; on every rank.
    """
    failure: Exception | None = None
    steps: list[int] = []
    try:
        if rank == 0 and isinstance(path, Path):
            notes.use(path)
        steps = committed_steps(path) if rank == 0 else []
        if rank == 0:
            with suppress(OSError):  # of a folder that can only be read, the run cannot save to
                remove_marker(path)
        # A run that began anew beside a file of this name, or before its disk is mounted, would fail when it saves.
        if rank == 0 and not steps and (path.is_file() or dangling_link(path) or not start_fresh):
            raise CheckpointError(
                f"{why_no_checkpoint(path)}Pass the folder that booster.save wrote, or "
                'missing="fresh" to begin a new run where there is none.'
            )
    except Exception as error:
        failure = error
    _agree(control, failure)
    (steps, *_) = gather_objects(control, _RESUME, steps)
    rejected: list[str] = []
    for step in steps:
        manifest, reason = verified(control, _RESUME, step_folder(path, step), partial(open_step, path, step))
        if not reason:
            _report(rejected, step)
            return manifest
        rejected.append(f"step {step}: {reason}")
    if rejected:
        raise CheckpointError(
            f"{path} holds no checkpoint that is intact. {'; '.join(rejected)}. Restore the files from a copy, or "
            "begin a new run in another folder."
        )
    return None


def _report(rejected: Sequence[str], step: int) -> None:
    if rejected:
        get_dist_logger().warning(
            f"resuming from step {step}, because later checkpoints are damaged: {'; '.join(rejected)}.", ranks=[0]
        )


def _own_generators(manifest: Manifest, parts: RunParts) -> Any:
    """The states of the generators that this rank goes on with.

    In the layout that saved them, those of this rank; else those of the first rank of this replica, or of the one whose
    number is as far as the replicas go round.
    """
    layout, grid = parts.engine.layout, parts.engine.layout.grid
    generators, replicas = manifest.state["generators"], manifest.state["replicas_of_ranks"]
    sizes = {"dp_size": grid.dp_size, "pp_size": grid.pp_size, "tp_size": grid.tp_size}
    rank = layout.world.rank
    if any(manifest.layout[name] != size for name, size in sizes.items()):
        rank = replicas.index(layout.here.dp % (max(replicas) + 1))
    return generators["states"][generators["of_ranks"][rank]]


def _agree(control: Group, failure: Exception | None) -> None:
    agree(control, _RESUME, failure, "resuming from a checkpoint")
