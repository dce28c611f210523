"""Save and load an optimizer or an LR schedule by itself, in folders of the form that checkpoints of runs have."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hybridpp.checkpoint.commit import clean
from hybridpp.checkpoint.folder_kind import KINDS, kind_of_manifest, other_kind
from hybridpp.checkpoint.manifest import Manifest
from hybridpp.checkpoint.plain_values import decode, encode
from hybridpp.checkpoint.reader import fill, plan_reads, read_manifest
from hybridpp.checkpoint.remote_path import AnyPath
from hybridpp.checkpoint.writer import Holding
from hybridpp.cluster import Group, gather_objects
from hybridpp.errors import CheckpointError, ConfigError, text_of
from hybridpp_plugins.agreement import agree
from hybridpp_plugins.engine import Engine
from hybridpp_plugins.optimizer import HybridOptimizer
from hybridpp_plugins.optimizer_part import OptimizerPart, merged_optimizer
from hybridpp_plugins.optimizer_state import RunProgress
from hybridpp_plugins.rank_shares import RankShares, held_weights
from hybridpp_plugins.stored_values import check_schedule
from hybridpp_plugins.verified_folder import verified

_PREFIX = "model0/"


class _Part:
    """What is written by itself: the newest save replaces the one before it."""

    def check(self) -> None:
        """Refuse what cannot be saved."""

    def after_commit(self, folder: AnyPath, manifest: Manifest) -> list[str]:
        """Remove the files of saves before this one; returns what could not be removed."""
        try:
            clean(folder, manifest.files)
        except OSError as error:
            return [f"{folder}: {error.strerror}"]
        return []


class OptimizerContents(_Part):
    """What a save of an optimizer writes: its state and, in half precision, the master weights.

    Args:
        engine: of the model that it updates.
        boosted: the optimizer.
    """

    call = "booster.save_optimizer"

    def __init__(self, engine: Engine, boosted: HybridOptimizer):
        self._engine, self._boosted = engine, boosted
        self.step, self.zero_stage = boosted.applied_steps, engine.zero_stage
        self._shares = RankShares(engine, {})
        self._part = OptimizerPart(engine, boosted, self._shares, _PREFIX)

    def check(self) -> None:
        """Refuse weights without values. Collective: all ranks."""
        self._engine.original.uninitialized.check(self._engine.layout.control)

    def described(self) -> dict[str, Any]:
        """What this rank contributes besides tensors; see :meth:`OptimizerPart.described`."""
        self._part.check_can_save(self.call)
        return {"optimizer": self._part.described()}

    def holdings(self) -> list[Holding]:
        """The tensors that this rank writes."""
        self._boosted.target.pull()
        masters = trained_weights_of(self._engine, self._shares, to_write=True) if self._engine.weights.in_half else []
        return [*masters, *self._part.holdings()]

    def state(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The state of the manifest."""
        return {
            "optimizer": merged_optimizer([row["optimizer"] for row in rows]),
            "model": type(self._engine.model).__name__,
            "progress": asdict(self._engine.progress),
        }


class ScheduleContents(_Part):
    """What a save of an LR schedule writes.

    Args:
        lr_scheduler: boosted or not.
    """

    call = "booster.save_lr_scheduler"
    step = zero_stage = 0

    def __init__(self, lr_scheduler: Any):
        self._lr_scheduler = lr_scheduler

    def described(self) -> dict[str, Any]:
        """The state.

        Raises:
            ConfigError: there is none, or it holds an object.
        """
        return {
            "class": _class_name(self._lr_scheduler),
            "state": encode(self._lr_scheduler.state_dict(), "lr_scheduler.state_dict()"),
        }

    def holdings(self) -> list[Holding]:
        """No tensors."""
        return []

    def state(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The state of the manifest: that of rank 0."""
        return {"lr_scheduler": {"class": rows[0]["class"], "state": rows[0]["state"]}}


def trained_weights_of(engine: Engine, shares: RankShares, *, to_write: bool = False) -> list[Holding]:
    """What this rank updates of the trained weights."""
    return [
        Holding(
            f"{_PREFIX}weights/{weight.name}",
            weight.tensor.dtype,
            shares.full_shape(weight.name, weight.tensor),
            shares.parts(weight.name, weight.tensor, to_write=to_write),
        )
        for weight in held_weights(engine)
        if weight.is_trained
    ]


def load_optimizer(engine: Engine, boosted: HybridOptimizer, folder: AnyPath) -> None:
    """See :meth:`hybridpp.Booster.load_optimizer`. Collective: all ranks."""
    control, call = engine.layout.control, "in booster.load_optimizer"
    engine.original.uninitialized.check(control)
    manifest = _opened(control, call, folder, "optimizer")
    shares = RankShares(engine, {})
    part = OptimizerPart(engine, boosted, shares, _PREFIX)
    names = gather_objects(control, call, part.group_names)
    saved = manifest.state["optimizer"]
    failure: Exception | None = None
    try:
        state, holdings = part.plan(saved, manifest.tensors, names)
        if any(key.startswith(f"{_PREFIX}weights/") for key in manifest.tensors):
            holdings += trained_weights_of(engine, shares)
        reads = plan_reads(manifest.tensors, holdings)
    except CheckpointError as error:
        model, kind = manifest.state["model"], type(engine.model).__name__
        failure = CheckpointError(
            f"{folder} does not fit this optimizer of a {kind}: it was saved with a {model}, and {text_of(error)}. "
            "Nothing was changed."
        )
    except Exception as error:
        failure = error
    _agree(control, call, failure)
    try:
        fill(folder, reads)
    except Exception as error:
        failure = error
    _agree(control, call, failure)
    vars(engine.progress).update(vars(RunProgress(**manifest.state["progress"])))
    part.load(saved, state)


def load_schedule(control: Group, lr_scheduler: Any, folder: AnyPath) -> None:
    """See :meth:`hybridpp.Booster.load_lr_scheduler`. Collective: all ranks."""
    call = "in booster.load_lr_scheduler"
    failure: Exception | None = None
    try:
        kind = _class_name(lr_scheduler)
    except ConfigError as error:
        failure = error
    _agree(control, call, failure)
    saved = _opened(control, call, folder, "lr_scheduler").state["lr_scheduler"]
    if saved["class"] != kind:
        raise CheckpointError(
            f"{folder} holds the state of a {saved['class']}, which does not fit a {kind}. Use the same class of "
            "schedule. Nothing was changed."
        )
    state = decode(saved["state"])
    try:
        check_schedule(lr_scheduler, state)
    except CheckpointError as error:
        raise CheckpointError(f"{folder} cannot be used: {text_of(error)}. Nothing was changed.") from error
    lr_scheduler.load_state_dict(state)


def _class_name(lr_scheduler: Any) -> str:
    """The class of a schedule, below what boost put around it.

    Raises:
        ConfigError: it has no state.
    """
    if not (hasattr(lr_scheduler, "state_dict") and hasattr(lr_scheduler, "load_state_dict")):
        raise ConfigError(
            f"an LR schedule has state_dict and load_state_dict: got {type(lr_scheduler).__name__}. Pass the one that "
            "booster.boost returned."
        )
    unwrap = getattr(lr_scheduler, "unwrap", None)
    return type(lr_scheduler if unwrap is None else unwrap()).__name__


def _opened(control: Group, call: str, folder: AnyPath, kind: str) -> Manifest:
    """The manifest of a folder that is intact and of a kind. Collective: all ranks.

    Raises:
        CheckpointError: there is none; on every rank.
    """
    manifest, reason = verified(control, call, folder, lambda: read_manifest(folder))
    what, writer, _ = KINDS[kind]
    if reason or manifest is None:
        way_out = f"{other_kind(folder)}Pass the folder that {writer} wrote."
        if kind_of_manifest(folder) == kind:  # this call reads such a folder, but for its damage
            way_out = f"Restore the files from a copy, or pass another folder that {writer} wrote."
        raise CheckpointError(f"{folder} holds no intact save of {what}: {reason}. {way_out}")
    if kind not in manifest.state:
        other = next(name for name in KINDS if name in manifest.state)
        raise CheckpointError(
            f"{folder} holds {KINDS[other][0]}, not {what}. Call {KINDS[other][2]}, or pass the folder that {writer} "
            "wrote."
        )
    return manifest


def _agree(control: Group, call: str, failure: Exception | None) -> None:
    agree(control, call, failure, "loading the state")
