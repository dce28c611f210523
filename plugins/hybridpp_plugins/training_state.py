"""One model's training as a checkpoint has it: tensors as boxes, everything else by name as JSON."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from hybridpp.checkpoint.digest import tensor_digest
from hybridpp.checkpoint.manifest import Manifest
from hybridpp.checkpoint.model_origin import described_origin
from hybridpp.checkpoint.plain_values import decode, encode
from hybridpp.checkpoint.reader import PlannedRead, plan_reads
from hybridpp.checkpoint.writer import Holding
from hybridpp.cluster import get_dist_logger
from hybridpp.errors import CheckpointError, some_of
from hybridpp.saving import RUN_PARTS
from hybridpp_plugins.engine import Engine
from hybridpp_plugins.optimizer_part import OptimizerPart, merged_optimizer
from hybridpp_plugins.optimizer_state import RunProgress
from hybridpp_plugins.rank_shares import RankShares, find_buffer_owners, held_weights, is_extra_state, state_of
from hybridpp_plugins.replica_loader import DataPosition, ReplicaDataLoader
from hybridpp_plugins.stored_values import check_extra_state, check_schedule


class RunParts(NamedTuple):
    """What belongs to one model's training.

    Attributes:
        engine: of the boosted model.
        lr_scheduler: that boost returned, if there is one.
        dataloader: that was given to boost, if it counts what the loop took.
        has_other_loader: whether one was given that does not.
    """

    engine: Engine
    lr_scheduler: LRScheduler | None
    dataloader: ReplicaDataLoader | None
    has_other_loader: bool = False


class TrainingState:
    """One model's training, for a checkpoint.

    Collective: all ranks must make it, with the same argument ``compares``.

    Args:
        parts: what belongs to it.
        index: of the model among those of the job.
        call: that this rank is in.
        compares: whether to find out which replicas have buffers of their own, to write them.
        resumed: the parts that a load takes of a checkpoint: of :data:`hybridpp.saving.RUN_PARTS`.
    """

    def __init__(self, parts: RunParts, index: int, call: str, *, compares: bool, resumed: Collection[str] = RUN_PARTS):
        self._engine, self._scheduler, self._loader, self._has_other_loader = parts
        self._prefix, self._resumed = f"model{index}/", resumed
        self._compares = compares and self._engine.layout.dp.size > 1
        self._owners = find_buffer_owners(self._engine, call, tensor_digest if self._compares else None)
        self._shares = RankShares(self._engine, self._owners.position, divides_writing=True)
        boosted = self._engine.optimizer
        self._optimizer = boosted and OptimizerPart(self._engine, boosted, self._shares, self._prefix)

    @property
    def engine(self) -> Engine:
        """The engine of the model."""
        return self._engine

    # Saving

    def check_can_save(self) -> None:
        """Refuse a moment at which a checkpoint would lack something.

        Raises:
            ConfigError: gradients are held.
        """
        if self._optimizer is not None:
            self._optimizer.check_can_save("booster.save")

    def holdings(self) -> list[Holding]:
        """What this rank writes.

        Raises:
            CheckpointError: see :meth:`OptimizerByName.described_state`.
        """
        if self._engine.optimizer is not None:
            self._engine.optimizer.target.pull()
        else:
            self._engine.masters.copy_from_model()
        found = []
        for name, tensor, _ in held_weights(self._engine):
            shape, parts = self._shares.full_shape(name, tensor), self._shares.parts(name, tensor, to_write=True)
            found.append(Holding(f"{self._prefix}weights/{name}", tensor.dtype, shape, parts))
            if name in self._owners.differing and self._writes_for_replica(name):
                found.append(Holding.of_all(self._replica_key(name, self._engine.layout.here.dp), tensor))
        if self._optimizer is not None:
            found += self._optimizer.holdings()
        return found

    def _writes_for_replica(self, name: str) -> bool:
        here = self._engine.layout.here
        return here.tp == 0 and self._owners.position[name] == here.pp

    def _replica_key(self, name: str, replica: int) -> str:
        return f"{self._prefix}replica{replica}/{name}"

    def described(self) -> dict[str, Any]:
        """Everything but tensors, as JSON. Of what all ranks have, that of rank 0 counts; by name, that of the first.

        Raises:
            CheckpointError: see :meth:`OptimizerByName.described_state`.
            ConfigError: the state of the optimizer or the schedule holds an object.
        """
        scheduler = self._scheduler and encode(self._scheduler.state_dict(), "lr_scheduler.state_dict()")
        return {
            "class": type(self._engine.model).__name__,
            "progress": asdict(self._engine.progress),
            "extra_state": self._extra_state(),
            "optimizer": None if self._optimizer is None else self._optimizer.described(),
            "lr_scheduler": scheduler,
            "data": None if self._loader is None else list(self._loader.position()),
            "origin": self._origin(),
        }

    def _origin(self) -> dict[str, Any] | None:
        """What the model was before boost, which rank 0 says for all."""
        original = self._engine.original
        if self._engine.layout.world.rank:
            return None
        return described_origin(self._engine.model, original.aliases, original.dtypes)

    def _extra_state(self) -> dict[str, list[Any]]:
        """What modules return from ``get_extra_state``, after whether the module has tensors on this rank."""
        held = [weight.name for weight in held_weights(self._engine)]
        return {
            name: [any(other.startswith(name.removesuffix("_extra_state")) for other in held), encode(value, name)]
            for name, value in state_of(self._engine).items()
            if is_extra_state(name)
        }

    # Loading

    def plan(self, manifest: Manifest, stored: Mapping[str, Any], all_names: Sequence[Any]) -> "PlannedState":
        """Check that a checkpoint fits, and plan what is read of it. Nothing of the run changes.

        Args:
            manifest: of the checkpoint.
            stored: this model's part of its state.
            all_names: by rank, the names of :attr:`group_names`.

        Raises:
            CheckpointError: it does not fit.
        """
        is_import = "imported_from" in stored
        holdings, missing = self._plan_model(manifest, stored) if "model" in self._resumed else ([], set[str]())
        takes_schedule = "lr_scheduler" in self._resumed and not is_import
        if takes_schedule and (self._scheduler is None) != (stored["lr_scheduler"] is None):
            one, other = ("has", "was saved without") if self._scheduler is not None else ("lacks", "was saved with")
            raise CheckpointError(f"the run {one} an LR scheduler, and the checkpoint {other} one. Pass it to boost")
        takes_data = "dataloader" in self._resumed
        position = None if stored["data"] is None or not takes_data else DataPosition(*stored["data"])
        if not takes_data:
            pass
        elif self._loader is not None:
            if position is None and not is_import:
                get_dist_logger().warning(
                    "the checkpoint has no position in the data, because its run passed no dataloader of "
                    "plugin.prepare_dataloader to boost: the data start at the first epoch.",
                    ranks=[0],
                )
            elif position is not None:
                self._loader.check_position(position)
        elif self._has_other_loader:
            get_dist_logger().warning(
                "the dataloader that boost was given is not one of plugin.prepare_dataloader, so it begins at the "
                "first epoch. Set its position from the extras of the checkpoint.",
                ranks=[0],
            )
        if is_import:
            self._say_what_is_fresh(stored, missing)
        state: dict[str, dict[str, Any]] = {}
        if self._optimizer is not None and "optimizer" in self._resumed:
            saved = stored["optimizer"]
            if saved is None and not is_import:
                raise CheckpointError("the checkpoint was saved without an optimizer, and the run has one")
            if saved is not None:
                state, more = self._optimizer.plan(saved, manifest.tensors, all_names)
                holdings += more
        schedule = None
        if takes_schedule and self._scheduler is not None:
            schedule = decode(stored["lr_scheduler"])
            check_schedule(self._scheduler, schedule)
        extra_state = self._checked_extra_state(stored) if "model" in self._resumed else {}
        return PlannedState(plan_reads(manifest.tensors, holdings), state, position, schedule, extra_state)

    def _checked_extra_state(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """The values for ``set_extra_state``, by name."""
        found = {}
        for name in filter(is_extra_state, state_of(self._engine)):
            if name in stored["extra_state"]:
                found[name] = decode(stored["extra_state"][name])
                check_extra_state(self._module_of(name), name, decode(stored["extra_state"][name]))
        return found

    def _module_of(self, name: str) -> Any:
        """The module whose extra state has a name."""
        return self._engine.model.get_submodule(name.rpartition(".")[0])

    def _plan_model(self, manifest: Manifest, stored: Mapping[str, Any]) -> tuple[list[Holding], set[str]]:
        """What is read into the model, and the names of extra state that the checkpoint lacks."""
        keys = self._weight_keys(manifest, stored)
        extra = {name for name in state_of(self._engine) if is_extra_state(name)}
        missing = extra - set(stored["extra_state"])
        if missing and "imported_from" not in stored:
            raise CheckpointError(f"the checkpoint does not fit this model: missing {some_of(sorted(missing))}")
        holdings = [self._weight_holding(keys[name], name, tensor) for name, tensor, _ in held_weights(self._engine)]
        return holdings, missing

    @property
    def group_names(self) -> list[list[str]]:
        """The names of the parameters of each of the optimizer's groups on this rank."""
        return [] if self._optimizer is None else self._optimizer.group_names

    def _say_what_is_fresh(self, stored: Mapping[str, Any], extra_state: set[str]) -> None:
        fresh = ["the random generators"]
        if self._optimizer is not None and stored["optimizer"] is None:
            fresh.append("the optimizer's state")
        if self._scheduler is not None:
            fresh.append("the LR schedule")
        if self._loader is not None:
            fresh.append("the position in the data")
        fresh += sorted(extra_state)
        get_dist_logger().warning(
            f"the checkpoint was imported from {stored['imported_from']}, so these begin anew: {', '.join(fresh)}.",
            ranks=[0],
        )

    def _weight_keys(self, manifest: Manifest, stored: Mapping[str, Any]) -> dict[str, str]:
        """The key of each weight and buffer of the complete model. An import may have a tied weight by another name.

        Raises:
            CheckpointError: some are missing, or others are there.
        """
        prefix, original = f"{self._prefix}weights/", self._engine.original
        there = {key.removeprefix(prefix) for key in manifest.tensors if key.startswith(prefix)}
        tensors = {*self._engine.staged.owners, *original.buffer_names}
        here = {name for name in tensors if name not in original.aliases and not is_extra_state(name)}
        source = {name: name for name in here}
        if "imported_from" in stored:
            for alias, name in original.aliases.items():
                if name not in there and alias in there:
                    source[name] = alias
            there -= original.aliases.keys() - set(source.values())
        if there != set(source.values()):
            raise CheckpointError(
                f"the checkpoint of a {stored['class']} does not fit this {type(self._engine.model).__name__}: missing "
                f"{some_of(sorted(set(source.values()) - there))}, unexpected "
                f"{some_of(sorted(there - set(source.values())))}"
            )
        return {name: self._own_key(manifest, name, f"{prefix}{other}") for name, other in source.items()}

    def _own_key(self, manifest: Manifest, name: str, key: str) -> str:
        own = self._replica_key(name, self._engine.layout.here.dp)
        return own if own in manifest.tensors else key

    def _weight_holding(self, key: str, name: str, tensor: Tensor) -> Holding:
        return Holding(key, tensor.dtype, self._shares.full_shape(name, tensor), self._shares.parts(name, tensor))

    def incomplete(self) -> AbstractContextManager[None]:
        """A context in which weights are read: where that fails, weights that had no values still have none."""
        return self._engine.original.uninitialized.kept_on_failure()

    def load(self, planned: "PlannedState", stored: Mapping[str, Any]) -> int:
        """Go on from a state whose tensors were read. Collective: all replicas.

        Returns:
            How many steps of the epoch are done, by the dataloader.
        """
        engine, resumed = self._engine, self._resumed
        if "model" in resumed:
            for name, value in planned.extra_state.items():
                self._module_of(name).set_extra_state(value)
        if "generators" in resumed:
            vars(engine.progress).update(vars(RunProgress(**stored["progress"])))
        self._load_optimizer(planned, stored)
        if "model" in resumed:
            engine.original.uninitialized.fill({*engine.staged.owners, *engine.original.buffer_names})
        if self._scheduler is not None and planned.schedule is not None:
            self._scheduler.load_state_dict(planned.schedule)
        if self._loader is None or planned.position is None:
            return 0
        return self._loader.go_on(planned.position)

    def _load_optimizer(self, planned: "PlannedState", stored: Mapping[str, Any]) -> None:
        """Bring what was read into the optimizer and, of the weights, from the masters into the model."""
        if self._optimizer is None:
            if "model" in self._resumed:
                self._engine.masters.copy_to_model()
        elif stored["optimizer"] is None or "optimizer" not in self._resumed:
            if "model" in self._resumed:
                self._optimizer.start_anew()
        else:
            keeps_rates = self._scheduler is not None and "lr_scheduler" not in self._resumed
            self._optimizer.load(stored["optimizer"], planned.state, keeps_rates=keeps_rates)


class PlannedState(NamedTuple):
    """What is loaded of a checkpoint.

    Attributes:
        reads: into the model, and into the tensors of ``state``.
        state: of the optimizer, by name.
        position: in the data; None: the checkpoint has none.
        schedule: the state of the LR schedule; None: it begins anew.
        extra_state: for ``set_extra_state`` of modules, by name.
    """

    reads: list[PlannedRead]
    state: dict[str, dict[str, Any]]
    position: DataPosition | None
    schedule: dict[str, Any] | None
    extra_state: dict[str, Any]


def merged_states(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One model's state, from what each rank described of it, by rank.

    Raises:
        CheckpointError: the ranks are not at the same position in the data.
    """
    first = dict(rows[0])
    for rank, row in enumerate(rows):
        if row["data"] != first["data"]:
            raise CheckpointError(
                f"the ranks took different numbers of batches: (epoch, samples, ...) is {first['data']} on rank 0 and "
                f"{row['data']} on rank {rank}. Let every rank iterate over the dataloader that was given to boost."
            )
    # Of a module that runs on another stage, a rank has the state from before boost.
    extra = [(owns, name, value) for row in reversed(rows) for name, (owns, value) in row["extra_state"].items()]
    first["extra_state"] = {name: value for _, name, value in sorted(extra, key=lambda entry: entry[0])}
    if first["optimizer"] is not None:
        first["optimizer"] = merged_optimizer([row["optimizer"] for row in rows])
    return first
