"""Stages of calls, owners of parameters, and the values sent between stages, derived from a trace and a cut."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple, Protocol

from torch import Tensor

from hybridpp.errors import PartitionError
from hybridpp.partition.cache_entries import refuse_divided_entries
from hybridpp.partition.calls import TensorSpec, Trace, UnitCall
from hybridpp.partition.derivatives import refuse_divided_derivatives
from hybridpp.partition.left_state import LeftKey
from hybridpp.partition.resets import AttributeReset
from hybridpp.partition.taint import Value


class CutPoint(NamedTuple):
    """A call of a block after which the model is cut."""

    block: str
    occurrence: int


def block_ends(trace: Trace, blocks: Sequence[str]) -> list[int]:
    """Indices of the calls of blocks, after each of which a stage can end."""
    return [index for index, call in enumerate(trace.calls) if call.name in set(blocks)]


def cut_after(trace: Trace, indices: Iterable[int]) -> tuple[CutPoint, ...]:
    """The cut after the calls with these indices."""
    return tuple(CutPoint(trace.calls[index].name, trace.calls[index].occurrence) for index in indices)


def cut_at_counts(trace: Trace, ends: Sequence[int], counts: Sequence[int]) -> tuple[CutPoint, ...]:
    """The cut whose stages have so many of the calls at ``ends`` each."""
    return cut_after(trace, [ends[sum(counts[: stage + 1]) - 1] for stage in range(len(counts) - 1)])


def fitting_cut(trace: Trace, cut: tuple[CutPoint, ...], callers: Mapping[str, set[int]]) -> tuple[CutPoint, ...]:
    """The cut of a forward that may leave out blocks which end stages (a tower for images, in a batch of texts alone).

    Such a stage ends before the first call of a unit of a later one, and may call nothing.

    Args:
        trace: of the forward.
        cut: of the forward that the model was cut by.
        callers: the stages that call each unit there, by its name.

    Raises:
        PartitionError: the first stage would call nothing, or the forward calls the blocks in another order.
    """
    points = [CutPoint(call.name, call.occurrence) for call in trace.calls]
    first_stages = [min(callers.get(point.block, ()), default=0) for point in points]
    found: list[CutPoint] = []
    start = 0
    for stage, point in enumerate(cut):
        if point in points:
            start = max(start, points.index(point) + 1)
        else:
            start = next((at for at in range(start, len(points)) if first_stages[at] > stage), start)
        if not start:
            if _number_of_calls(trace, point.block):
                raise _called_too_seldom(trace, point, stage)
            raise PartitionError(
                f"the forward does not call block {point.block!r}, which ends stage {stage}, for this input, nor "
                "anything else of that stage. Use inputs that run every block, another cut (split_points=...), or "
                "pp_size=1."
            )
        found.append(points[start - 1])
    return tuple(found)


def _number_of_calls(trace: Trace, block: str) -> int:
    return sum(call.name == block for call in trace.calls)


def _called_too_seldom(trace: Trace, point: CutPoint, stage: int) -> PartitionError:
    """The error of a forward that calls a block, but not as often, or in another order."""
    number = _number_of_calls(trace, point.block)
    if number > point.occurrence:
        return PartitionError(
            "the forward calls the blocks that end stages in another order for this input: call "
            f"{point.occurrence + 1} of block {point.block!r}, which ends stage {stage}, comes before the end of an "
            "earlier stage. Call blocks in one order, or use pp_size=1."
        )
    return PartitionError(
        f"stage {stage} ends with call {point.occurrence + 1} of block {point.block!r}, and the forward calls it "
        f"{number} {'time' if number == 1 else 'times'} for this input: its number of calls depends on the input, as "
        "in a loop over samples. Call the block once for all samples (of unlike lengths: padded, with a mask), cut "
        "after another block (split_points=...), or use pp_size=1."
    )


def assign_stages(trace: Trace, cut: tuple[CutPoint, ...]) -> tuple[int, ...]:
    """The stage of each call: the number of cut points before it. Points may be equal: then a stage calls nothing.

    Raises:
        PartitionError: the forward does not call a block that ends a stage, or calls them in another order, or a stage
            computes a derivative that goes back through another, or reads what another has put in a key-value cache.
    """
    stages: list[int] = []
    stage = 0
    for call in trace.calls:
        stages.append(stage)
        while stage < len(cut) and CutPoint(call.name, call.occurrence) == cut[stage]:
            stage += 1
    if stage < len(cut):
        if _number_of_calls(trace, cut[stage].block):
            raise _called_too_seldom(trace, cut[stage], stage)
        raise PartitionError(
            f"the forward does not call block {cut[stage].block!r}, which ends stage {stage}, for this input. "
            "Use inputs that run every block, or pp_size=1."
        )
    refuse_divided_derivatives(trace.derivatives, [call.name for call in trace.calls], stages)
    refuse_divided_entries(trace.calls, stages)
    return tuple(stages)


class BoundarySharding(Protocol):
    """Sharding of values between stages over the ranks that run the same stage; each rank sends only its shard."""

    def shard_spec(self, name: str, leaf: int, full: TensorSpec) -> TensorSpec | None:
        """Spec of this rank's shard of a leaf that the unit ``name`` returns; None: it is sent unsharded."""

    def shard(self, full: Tensor) -> Tensor:
        """This rank's shard of such a value."""

    def unshard(self, shard: Tensor, spec: TensorSpec) -> Tensor:
        """The value described by ``spec``, as container code and units use it."""


@dataclass(frozen=True)
class StagePlan:
    """The work of one stage for inputs of one signature.

    Attributes:
        stage: which stage.
        calls: every unit call of the complete forward; empty for a model that is not cut.
        stages: the stage of each call.
        incoming: the values received from the previous stage, in the order of the messages.
        outgoing: the values sent to the next stage, in the order of the messages.
        incoming_specs: shapes and dtypes of ``incoming``.
        outgoing_specs: shapes and dtypes of ``outgoing``.
        sharded: the values of both of which only this rank's shard is sent; their specs are of the shard.
        resets: the attributes that the forward resets after this stage has left it.
        own_state: the attributes that container code leaves for the next forward, of which each stage has its own.
    """

    stage: int = 0
    calls: tuple[UnitCall, ...] = ()
    stages: tuple[int, ...] = ()
    incoming: tuple[Value, ...] = ()
    outgoing: tuple[Value, ...] = ()
    incoming_specs: tuple[TensorSpec, ...] = ()
    outgoing_specs: tuple[TensorSpec, ...] = ()
    sharded: frozenset[Value] = frozenset()
    resets: tuple[AttributeReset, ...] = ()
    own_state: tuple[LeftKey, ...] = ()

    # Asked for by every micro-batch.
    @cached_property
    def is_last(self) -> bool:
        """Whether the forward runs to its end on this stage."""
        return self.last_local is None

    @cached_property
    def last_local(self) -> int | None:
        """The call after which this stage leaves the forward; None if it runs to its end.

        It is one of an earlier stage where this one calls nothing.
        """
        if not self.calls or self.stage == self.stages[-1]:
            return None
        return bisect_right(self.stages, self.stage) - 1

    @cached_property
    def is_seeded_everywhere(self) -> bool:
        """Whether all units set their RNG streams: activation checkpointing tells repeated calls apart by the seeds."""
        repeated = [call.name for call in self.calls if call.checkpointed]
        return len(repeated) > len(set(repeated))

    @cached_property
    def outgoing_set(self) -> frozenset[Value]:
        """``outgoing`` as a set."""
        return frozenset(self.outgoing)

    @cached_property
    def calls_with_outgoing(self) -> frozenset[int]:
        """The calls that produce outgoing values."""
        return frozenset(value.call for value in self.outgoing)

    @cached_property
    def own_units(self) -> frozenset[str]:
        """The units that this stage calls."""
        return frozenset(call.name for call, at in zip(self.calls, self.stages, strict=True) if at == self.stage)


def uses(trace: Trace, stages: tuple[int, ...]) -> dict[str, set[int]]:
    """The stages that use each parameter; ownership follows use, not the order of registration."""
    needed: dict[str, set[int]] = {}
    for call, stage in zip(trace.calls, stages, strict=True):
        for name in (*call.parameters, *(source for source in call.sources if isinstance(source, str))):
            needed.setdefault(name, set()).add(stage)
    for source in trace.result_sources:
        if isinstance(source, str):
            needed.setdefault(source, set()).add(stages[-1])
    return needed


def unit_homes(kinds: Mapping[str, type], calls: Iterable[tuple[UnitCall, int]]) -> dict[str, set[int]]:
    """The stages that hold each unit: those that call it.

    A unit that nothing calls goes where the nearest called unit of the same class in the same container is: a second
    head stands beside the first, and other batches will use it there. Without such a unit it belongs to stage 0.

    Args:
        kinds: the class of each unit, by its name, in the order of registration.
        calls: of one forward or several, each with its stage.
    """
    found: dict[str, set[int]] = {}
    for call, stage in calls:
        for unit in (call.name, *call.others):
            found.setdefault(unit, set()).add(stage)
    order = {unit: index for index, unit in enumerate(kinds)}
    alike: dict[tuple[str, type], list[str]] = {}
    for unit in found:
        alike.setdefault((unit.rpartition(".")[0], kinds[unit]), []).append(unit)
    homes: dict[str, set[int]] = {}
    for unit, kind in kinds.items():
        siblings = alike.get((unit.rpartition(".")[0], kind), [])
        nearest = min(siblings, key=lambda other: (abs(order[other] - order[unit]), order[other]), default=unit)
        homes[unit] = set(found.get(nearest, {0}))
    return homes


def owners(
    needed: Mapping[str, set[int]], parameter_names: Iterable[str], homes: Mapping[str, set[int]] = MappingProxyType({})
) -> dict[str, tuple[int, ...]]:
    """The stages that hold each parameter, in order.

    Args:
        needed: the stages that use each parameter, as :func:`uses` finds them.
        parameter_names: of all parameters.
        homes: of units, as :func:`unit_homes` finds them. Unused parameters go with their unit; those of no unit belong
            to stage 0.
    """
    return {name: tuple(sorted(needed.get(name) or _home(name, homes))) for name in parameter_names}


def _home(name: str, homes: Mapping[str, set[int]]) -> set[int]:
    while name:
        name = name.rpartition(".")[0]
        if name in homes:
            return homes[name]
    return {0}


def names_by_stage(trace: Trace, stages: tuple[int, ...], parameter_names: tuple[str, ...]) -> list[set[str]]:
    """The parameters that each stage holds; unused ones count for stage 0."""
    return held_by_stage(owners(uses(trace, stages), parameter_names), max(stages, default=0) + 1)


def held_by_stage(held: Mapping[str, tuple[int, ...]], num_stages: int) -> list[set[str]]:
    """The names that each stage holds, from the stages that hold each name."""
    return [{name for name, at in held.items() if stage in at} for stage in range(num_stages)]


def stage_plan(
    trace: Trace, stages: tuple[int, ...], stage: int, sharding: BoundarySharding | None = None
) -> StagePlan:
    """What ``stage`` receives, runs and sends. Every rank derives its neighbours' tables from the same trace.

    Args:
        trace: of the forward.
        stages: of each call.
        stage: number of the stage.
        sharding: of the values between stages; None: they are sent unsharded.
    """
    last_use: dict[Value, int] = {}
    for sources, at in (
        *((call.sources, at_stage) for call, at_stage in zip(trace.calls, stages, strict=True)),
        (trace.result_sources, stages[-1]),
    ):
        for source in sources:
            if isinstance(source, Value):
                last_use[source] = max(at, last_use.get(source, 0))

    def crossing(boundary: int) -> tuple[Value, ...]:
        """Values produced before the stage ``boundary`` and used in it or after it."""
        return tuple(sorted(value for value, used in last_use.items() if stages[value.call] < boundary <= used))

    def specs(values: tuple[Value, ...]) -> tuple[TensorSpec, ...]:
        return tuple(sharded.get(value) or trace.calls[value.call].leaves[value.leaf] for value in values)

    incoming = crossing(stage)
    outgoing = crossing(stage + 1)
    sharded = _sharded_values(trace, {*incoming, *outgoing}, sharding) if sharding else {}
    shapes = specs(incoming), specs(outgoing)
    resets = trace.resets[stage] if stage < len(trace.resets) else ()
    return StagePlan(
        stage, trace.calls, stages, incoming, outgoing, *shapes, frozenset(sharded), resets, trace.replaced
    )


def _sharded_values(trace: Trace, values: set[Value], sharding: BoundarySharding) -> dict[Value, TensorSpec]:
    """The values of which only a shard is sent, with the shard's spec."""
    found = {}
    for value in values:
        call = trace.calls[value.call]
        # Values that are written to later, or are arguments, need their own memory.
        if value.leaf in call.written or value.leaf in call.arguments:
            continue
        spec = sharding.shard_spec(call.name, value.leaf, call.leaves[value.leaf])
        if spec is not None:
            found[value] = spec
    return found
