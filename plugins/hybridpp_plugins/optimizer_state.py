"""Metadata of a rank's optimizer state: the run's progress, and the rank and layout that it belongs to."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from hybridpp.cluster import Group, gather_objects
from hybridpp.config import Precision
from hybridpp.errors import ConfigError
from hybridpp.precision import MasterWeights
from hybridpp.tensor_parallel import ParameterSharding

_FORMAT = 3
_KEYS = ("optimizer", "loss_scale", "masters")
_WAY_OUT = (
    "Save optimizer.state_dict() on every rank, in a file with the rank in its name, and load it on the same rank of "
    "the same layout; or call booster.save_optimizer, whose result any layout loads."
)


@dataclass
class RunProgress:
    """A run's progress and the seed of its random numbers: the same on every rank.

    Attributes:
        seed: of random numbers in the forward (dropout).
        num_steps: training steps run so far.
        num_evaluations: evaluations run so far.
    """

    seed: int = 0
    num_steps: int = 0
    num_evaluations: int = 0


@dataclass(frozen=True)
class StepCounts:
    """Step counts of an optimizer.

    Attributes:
        applied: steps that updated weights.
        skipped: steps that were skipped.
        last_skipped: whether the last step was skipped.
    """

    applied: int = 0
    skipped: int = 0
    last_skipped: bool = False


class Segment(NamedTuple):
    """What of the parameters a replica updates: one of equal segments (ZeRO).

    Attributes:
        number: of the segment.
        out_of: how many; 1: the replica updates all parameters.
    """

    number: int = 0
    out_of: int = 1


class OptimizerStateOwner:
    """The rank that an optimizer's state belongs to.

    Args:
        optimizer: on this rank's parameters.
        updated: what it updates, by the parameter's name: parameters, masters, or pieces of them.
        masters: the fp32 masters among them.
        sharded: the sharding of the sharded parameters, by name.
        tp: the tensor-parallel ranks.
        precision: of the run.
        segment: that this replica updates.

    Attributes:
        is_divided: whether other replicas update other segments.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        updated: Mapping[str, nn.Parameter],
        masters: MasterWeights,
        sharded: Mapping[str, ParameterSharding],
        tp: Group,
        precision: Precision,
        segment: Segment,
    ):
        names = {id(tensor): name for name, tensor in updated.items()}
        self._groups = [
            [_described(names[id(parameter)], parameter, sharded) for parameter in group["params"]]
            for group in optimizer.param_groups
        ]
        self._masters = frozenset[str]() if masters.are_copies else frozenset(masters.masters)
        self._share = [tp.rank, tp.size]
        self._segment = list(segment)
        self.is_divided = segment.out_of > 1
        self._precision = str(precision)

    def by_name(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state dict of the optimizer with names of parameters in place of numbers."""
        names = [name for group in self._groups for name, *_ in group]
        groups = zip(state["param_groups"], self._groups, strict=True)
        return {
            **state,
            "state": {names[key] if isinstance(key, int) else key: value for key, value in state["state"].items()},
            "param_groups": [{**group, "params": [name for name, *_ in described]} for group, described in groups],
        }

    def by_number(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state dict of the optimizer from one :meth:`by_name`, or one of an older version, by numbers.

        Call it after :meth:`check`.
        """
        first, groups = 0, []
        for group in state["param_groups"]:
            groups.append({**group, "params": list(range(first, first + len(group["params"])))})
            first += len(group["params"])
        numbers = {
            name: n for n, name in enumerate(name for group in state["param_groups"] for name in group["params"])
        }
        found = {numbers.get(key, key): value for key, value in state["state"].items()}
        return {**state, "state": found, "param_groups": groups}

    def describe(self) -> dict[str, Any]:
        """The description that is saved in the state."""
        return {
            "parameters": self._groups,
            "shares_layers_as": self._share,
            "updates_segment": self._segment,
            "precision": self._precision,
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that does not belong to this rank.

        Raises:
            ConfigError: it is no optimizer state, or belongs to another rank, layout or precision.
        """
        if not isinstance(state, Mapping) or any(key not in state for key in _KEYS):
            kind = sorted(map(str, state))[:8] if isinstance(state, Mapping) else type(state).__name__
            raise ConfigError(
                f"load_state_dict needs the result of a boosted optimizer's state_dict: got {kind}. Load the state of "
                "a plain optimizer before booster.boost."
            )
        owner = state.get("owner", {})
        there = owner.get(
            "precision", self._precision if bool(state["masters"]) == bool(self._masters) else "another one"
        )
        if there != self._precision:
            raise ConfigError(
                f"this state has another precision: it was saved in {there}, and this run uses {self._precision}. Use "
                "the precision that saved it, or start a new optimizer from the saved weights."
            )
        segment = list(owner.get("updates_segment", [0, 1]))
        if segment != self._segment:
            raise ConfigError(
                f"this state belongs to another replica or zero_stage: it was saved by {_replica_in_words(segment)}, "
                f"and this is {_replica_in_words(self._segment)}. {_WAY_OUT}"
            )
        self._check_groups(state, owner.get("parameters", self._groups))
        if missing := self._masters - set(state["masters"]):
            raise ConfigError(
                f"this state belongs to another rank or layout: it has no master of {min(missing)!r}. {_WAY_OUT}"
            )
        share = owner.get("shares_layers_as", self._share)
        if list(share) != self._share:
            raise ConfigError(
                "this state belongs to another rank: it was saved by tensor-parallel rank {} of {}, and this is "
                "tensor-parallel rank {} of {}. ".format(*share, *self._share)
                + _WAY_OUT
            )

    def _check_groups(self, state: Mapping[str, Any], groups: list[list[list[Any]]]) -> None:
        sizes = [len(group["params"]) for group in state["optimizer"]["param_groups"]]
        if sizes != [len(group) for group in self._groups]:
            raise ConfigError(
                f"this state belongs to another rank, layout or optimizer: its groups have {sizes} parameters, those "
                f"of this rank {[len(group) for group in self._groups]}. {_WAY_OUT}"
            )
        for there, here in zip(groups, self._groups, strict=True):
            for saved, current in zip(there, here, strict=True):
                if list(saved) != current:
                    raise ConfigError(
                        f"this state belongs to another rank or layout: it has {_in_words(saved)} where this rank "
                        f"has {_in_words(current)}. {_WAY_OUT}"
                    )


def _described(name: str, parameter: nn.Parameter, sharded: Mapping[str, ParameterSharding]) -> list[Any]:
    """A parameter as plain lists: its name, its local shape and, if it is sharded, its sharding."""
    how_sharded = sharded.get(name)
    how = (
        []
        if how_sharded is None
        else [
            list(how_sharded.full_shape),
            how_sharded.dim,
            list(how_sharded.shard.widths),
            list(how_sharded.shard.copies),
        ]
    )
    return [name, list(parameter.shape), how]


def _replica_in_words(segment: list[int]) -> str:
    index, count = segment
    return "a replica that updates all of its parameters" if count == 1 else f"replica {index} of {count} with ZeRO"


def _in_words(described: list[Any]) -> str:
    name, shape, how = described
    return f"{name!r} of shape {tuple(shape)}" + (
        f", a shard of {tuple(how[0])} along dimension {how[1]}" if how else ""
    )


def pack(owner: OptimizerStateOwner, counts: StepCounts, progress: RunProgress) -> dict[str, Any]:
    """The entries of a state in addition to the optimizer's own."""
    return {"format": _FORMAT, "owner": owner.describe(), "counts": asdict(counts), "progress": asdict(progress)}


def check_on_all_ranks(
    owner: OptimizerStateOwner, state: Mapping[str, Any], control: Group
) -> tuple[StepCounts, RunProgress] | None:
    """Check the states that all ranks are about to load. Collective: all ranks of ``control``.

    Returns:
        The run's progress; None for a state of an older version, which does not contain it.

    Raises:
        ConfigError: on every rank, if a state belongs to another rank, or states were saved at different steps.
    """
    moment: dict[str, Any] | None = None
    failure: ConfigError | None = None
    try:
        owner.check(state)
        if "format" in state:
            moment = {**state["counts"], **state["progress"], "loss scale": state["loss_scale"]["scale"]}
    except ConfigError as error:
        failure = error
    rows = gather_objects(control, "in optimizer.load_state_dict", [None if failure is None else str(failure), moment])
    if failure is not None:
        raise failure
    for rank, (text, other) in enumerate(rows):
        if text is not None:
            raise ConfigError(f"rank {rank} was given a state of another rank or layout: {text}")
        if other != rows[0][1]:
            raise ConfigError(
                f"the ranks were given states of different steps: {_described_moment(rows[0][1])} on rank 0, "
                f"{_described_moment(other)} on rank {rank}. Load the states that all ranks saved at the same step."
            )
    if moment is None:
        return None
    return StepCounts(**state["counts"]), RunProgress(**state["progress"])


def _described_moment(moment: dict[str, Any] | None) -> str:
    return "a state of an older version" if moment is None else str(moment)
