"""What each stage of a cut would hold, compute and send, without allocating memory."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from hybridpp.config import PartitionConfig
from hybridpp.module_adapter import AdapterLayer, ModuleAdapter
from hybridpp.nn import walk
from hybridpp.nn.snapshot import preserved_modules
from hybridpp.partition.blocks import finest_units
from hybridpp.partition.calls import CallArguments, TensorSpec, Trace
from hybridpp.partition.cut import CutCriteria, choose_cut
from hybridpp.partition.intercept import Interceptor
from hybridpp.partition.measure import measure_seconds, unit_costs
from hybridpp.partition.memory import MemoryBudget
from hybridpp.partition.plan import assign_stages, owners, stage_plan, unit_homes, uses
from hybridpp.partition.requested_cut import named_blocks
from hybridpp.partition.traced_units import find_traced_units


@dataclass(frozen=True, kw_only=True)
class StageSummary:
    """Summary of one stage of a cut.

    Attributes:
        stage: number of the stage.
        calls: names of the units that it runs, in order; one that is called again occurs again.
        parameters: elements of each parameter that it holds, by name; a tied one has its first name.
        flops: floating-point operations of its forward, for the sample.
        sent: the tensors that it sends to the next stage, for the sample.
        state_bytes: bytes of its parameters in training, if a budget was given.
    """

    stage: int
    calls: tuple[str, ...]
    parameters: Mapping[str, int]
    flops: int
    sent: tuple[TensorSpec, ...]
    state_bytes: int = 0

    @property
    def num_parameters(self) -> int:
        """Elements of all its parameters."""
        return sum(self.parameters.values())

    @property
    def sent_bytes(self) -> int:
        """Size of what it sends."""
        return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in self.sent)


def describe_cut(
    model: nn.Module,
    num_stages: int,
    sample: CallArguments,
    config: PartitionConfig | None = None,
    dtypes: Mapping[int, torch.dtype] | None = None,
    held: MemoryBudget | None = None,
) -> tuple[StageSummary, ...]:
    """The stages that ``model`` would be cut into; it is not changed.

    Args:
        model: also on the meta device.
        num_stages: stages of the pipeline.
        sample: positional and keyword arguments of one micro-batch, on the CPU.
        config: where to cut.
        dtypes: of the model's tensors that would be cast, by ``id``.
        held: memory of parameters on a rank, and its limit; None: no limit.

    Raises:
        PartitionError: the model cannot be cut as requested.
    """
    config = config or PartitionConfig()
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    with preserved_modules(model):
        traced, stages = _cut(model, num_stages, sample, config, dtypes or {}, held)
    trace = traced.trace
    kinds = {unit: type(walk.submodule(model, unit)) for unit in traced.units}
    homes = unit_homes(kinds, zip(trace.calls, stages, strict=True))
    holders = owners(uses(trace, stages), sizes, homes)
    return tuple(
        StageSummary(
            stage=stage,
            calls=tuple(call.name for call, at in zip(trace.calls, stages, strict=True) if at == stage),
            parameters={name: size for name, size in sizes.items() if stage in holders[name]},
            flops=sum(call.flops for call, at in zip(trace.calls, stages, strict=True) if at == stage),
            sent=stage_plan(trace, stages, stage).outgoing_specs,
            state_bytes=sum(held.sizes[name] for name in sizes if stage in holders[name]) if held else 0,
        )
        for stage in range(num_stages)
    )


def _cut(
    model: nn.Module,
    num_stages: int,
    sample: CallArguments,
    config: PartitionConfig,
    dtypes: Mapping[int, torch.dtype],
    held: MemoryBudget | None,
) -> tuple["TracedModel", tuple[int, ...]]:
    traced = trace_model(model, num_stages, sample, config, dtypes)

    def seconds() -> list[float]:
        assert traced.interceptor is not None
        return measure_seconds(model, traced.interceptor, sample, torch.device("cpu"), dtypes)

    return traced, stages_of(model, traced, num_stages, config, held, seconds)


class TracedModel(NamedTuple):
    """A model's units, and their calls in one forward.

    Attributes:
        trace: of the forward, with FLOPs.
        blocks: the units that a balanced cut may follow.
        units: all units.
        interceptor: of the units; None: it is gone.
    """

    trace: Trace
    blocks: tuple[str, ...]
    units: tuple[str, ...]
    interceptor: Interceptor | None = None


def trace_model(
    model: nn.Module,
    num_stages: int,
    sample: CallArguments,
    config: PartitionConfig | None = None,
    dtypes: Mapping[int, torch.dtype] | None = None,
) -> TracedModel:
    """Trace a model as a cut into stages needs it; the caller restores the model's modules.

    Args:
        model, num_stages, sample, config, dtypes: as of :func:`describe_cut`.
    """
    cpu = torch.device("cpu")
    named = named_blocks(model, config or PartitionConfig())
    adapter = ModuleAdapter(model)
    finest = Interceptor(adapter, AdapterLayer.UNIT_RNG, finest_units(model))
    found = find_traced_units(
        adapter, num_stages, sample, finest, named=named, device=cpu, dtypes=dtypes or {}, count_flops=True
    )
    return TracedModel(found.trace, found.units.blocks, found.units.units, found.interceptor)


def stages_of(
    model: nn.Module,
    traced: TracedModel,
    num_stages: int,
    config: PartitionConfig | None = None,
    held: MemoryBudget | None = None,
    seconds: Callable[[], Sequence[float]] = list,
) -> tuple[int, ...]:
    """The stage of each call of a traced model.

    Args:
        model, num_stages, config, held: as of :func:`describe_cut`.
        traced: of the model, for as many stages.
        seconds: measures the calls, for ``balance="time"``.

    Raises:
        PartitionError: the model cannot be cut as requested.
    """
    config = config or PartitionConfig()
    costs = unit_costs(model, traced.trace, config.balance, seconds)
    cut = choose_cut(model, traced.trace, traced.blocks, num_stages, config, CutCriteria(costs, held))
    return assign_stages(traced.trace, cut)


def shared_parameters(stages: Sequence[StageSummary]) -> dict[str, tuple[int, ...]]:
    """The parameters that more than one stage holds, with these stages: tied weights, and units called on several."""
    holders: dict[str, list[int]] = {}
    for summary in stages:
        for name in summary.parameters:
            holders.setdefault(name, []).append(summary.stage)
    return {name: tuple(at) for name, at in holders.items() if len(at) > 1}
