"""From a trace and a place to cut: who owns what, and which values travel between stages."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch import Tensor

from hybridpp.partition.calls import TensorSpec, Trace, UnitCall
from hybridpp.partition.taint import Value


class Parts(Protocol):
    """Of some values, several ranks that run the same stage hold one part each, and only that travels."""

    def spec(self, name: str, leaf: int, whole: TensorSpec) -> TensorSpec | None:
        """This rank's part of a leaf that the unit ``name`` returns; None: it travels whole."""

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part of such a value."""

    def whole(self, part: Tensor, spec: TensorSpec) -> Tensor:
        """The value, as glue and units see it, that is described by ``spec``."""


@dataclass(frozen=True)
class StagePlan:
    """What one stage does for inputs of one signature.

    Attributes:
        stage: which stage.
        calls: every unit call of the whole forward; empty for a model that is not cut.
        stages: the stage of each call.
        incoming: the values that arrive from the previous stage, in the order they travel in.
        outgoing: the values that leave for the next stage, in the order they travel in.
        incoming_specs: shapes and dtypes of ``incoming``.
        outgoing_specs: shapes and dtypes of ``outgoing``.
        in_parts: those of both of which only this rank's part travels; the specs are of that.
    """

    stage: int = 0
    calls: tuple[UnitCall, ...] = ()
    stages: tuple[int, ...] = ()
    incoming: tuple[Value, ...] = ()
    outgoing: tuple[Value, ...] = ()
    incoming_specs: tuple[TensorSpec, ...] = ()
    outgoing_specs: tuple[TensorSpec, ...] = ()
    in_parts: frozenset[Value] = frozenset()

    # Asked for by every micro-batch.
    @cached_property
    def is_last(self) -> bool:
        """Whether the forward runs to its end here."""
        return self.last_local is None

    @cached_property
    def last_local(self) -> int | None:
        """The call after which this stage leaves the forward; None where it runs to its end."""
        if not self.calls or self.stage == self.stages[-1]:
            return None
        return len(self.stages) - 1 - self.stages[::-1].index(self.stage)

    @cached_property
    def leaving(self) -> frozenset[Value]:
        """The values of ``outgoing``."""
        return frozenset(self.outgoing)

    @cached_property
    def observed(self) -> frozenset[int]:
        """The calls that make them."""
        return frozenset(value.call for value in self.outgoing)

    @cached_property
    def own_units(self) -> frozenset[str]:
        """The units that this stage calls."""
        return frozenset(call.name for call, at in zip(self.calls, self.stages, strict=True) if at == self.stage)


def uses(trace: Trace, stages: tuple[int, ...]) -> dict[str, set[int]]:
    """The stages that need each parameter; ownership follows use, not the order of registration."""
    needed: dict[str, set[int]] = {}
    for call, stage in zip(trace.calls, stages, strict=True):
        for name in (*call.parameters, *(source for source in call.sources if isinstance(source, str))):
            needed.setdefault(name, set()).add(stage)
    for source in trace.result_sources:
        if isinstance(source, str):
            needed.setdefault(source, set()).add(stages[-1])
    return needed


def owners(trace: Trace, stages: tuple[int, ...], parameter_names: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """The stages that hold each parameter, in order; one that nothing uses belongs to stage 0."""
    needed = uses(trace, stages)
    return {name: tuple(sorted(needed.get(name, {0}))) for name in parameter_names}


def stage_plan(trace: Trace, stages: tuple[int, ...], stage: int, parts: Parts | None = None) -> StagePlan:
    """What ``stage`` receives, runs and sends. Every rank derives its neighbours' tables from the same trace.

    Args:
        trace: of the forward.
        stages: of each call.
        stage: which one.
        parts: what of the values between stages travels; None: all of it.
    """
    last_use: dict[Value, int] = {}
    for sources, at in (
        *((call.sources, place) for call, place in zip(trace.calls, stages, strict=True)),
        (trace.result_sources, stages[-1]),
    ):
        for source in sources:
            if isinstance(source, Value):
                last_use[source] = max(at, last_use.get(source, 0))

    def crossing(boundary: int) -> tuple[Value, ...]:
        """Values made before ``boundary`` (a stage) and needed in it or behind it."""
        return tuple(sorted(value for value, used in last_use.items() if stages[value.call] < boundary <= used))

    def specs(values: tuple[Value, ...]) -> tuple[TensorSpec, ...]:
        return tuple(in_parts.get(value) or trace.calls[value.call].leaves[value.leaf] for value in values)

    incoming = crossing(stage)
    outgoing = crossing(stage + 1)
    in_parts = _in_parts(trace, {*incoming, *outgoing}, parts) if parts else {}
    shapes = specs(incoming), specs(outgoing)
    return StagePlan(stage, trace.calls, stages, incoming, outgoing, *shapes, frozenset(in_parts))


def _in_parts(trace: Trace, values: set[Value], parts: Parts) -> dict[Value, TensorSpec]:
    """The values of which a part travels, with what that is."""
    found = {}
    for value in values:
        call = trace.calls[value.call]
        # What is written to later, or was an argument, is known by its memory.
        if value.leaf in call.written or value.leaf in call.arguments:
            continue
        spec = parts.spec(call.name, value.leaf, call.leaves[value.leaf])
        if spec is not None:
            found[value] = spec
    return found
