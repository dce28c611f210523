"""What each stage of a cut would hold, compute and send, without a number being allocated."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hybridpp.config import PartitionConfig
from hybridpp.partition.blocks import finest_units
from hybridpp.partition.calls import TensorSpec, Trace
from hybridpp.partition.cut import assign_stages, choose_cut, named_blocks
from hybridpp.partition.intercept import Interceptor
from hybridpp.partition.measure import measure_seconds, unit_costs
from hybridpp.partition.plan import owners, stage_plan
from hybridpp.partition.survey import survey
from hybridpp.partition.untouched import untouched

Sample = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class StageSummary:
    """One stage of a model that is cut.

    Attributes:
        stage: which one.
        calls: names of the units that it runs, in order; one that is called again occurs again.
        parameters: elements of each parameter that it holds, by name; a tied one has its first name.
        flops: floating-point operations of its forward, for the sample.
        sent: the tensors that it sends to the next stage, for the sample.
    """

    stage: int
    calls: tuple[str, ...]
    parameters: Mapping[str, int]
    flops: int
    sent: tuple[TensorSpec, ...]

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
    sample: Sample,
    config: PartitionConfig | None = None,
    dtypes: Mapping[int, torch.dtype] | None = None,
) -> tuple[StageSummary, ...]:
    """The stages that ``model`` would be cut into; it is left as it was found.

    Args:
        model: also on the meta device.
        num_stages: stages of the pipeline.
        sample: positional and keyword arguments of one micro-batch, on the CPU.
        config: where to cut.
        dtypes: of the model's tensors that would be cast, by ``id``.

    Raises:
        PartitionError: the model cannot be cut so.
    """
    config = config or PartitionConfig()
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    with untouched(model):
        trace, stages = _cut(model, num_stages, sample, config, dtypes or {})
    holders = owners(trace, stages, tuple(sizes))
    return tuple(
        StageSummary(
            stage=stage,
            calls=tuple(call.name for call, at in zip(trace.calls, stages, strict=True) if at == stage),
            parameters={name: size for name, size in sizes.items() if stage in holders[name]},
            flops=sum(call.flops for call, at in zip(trace.calls, stages, strict=True) if at == stage),
            sent=stage_plan(trace, stages, stage).outgoing_specs,
        )
        for stage in range(num_stages)
    )


def _cut(
    model: nn.Module, num_stages: int, sample: Sample, config: PartitionConfig, dtypes: Mapping[int, torch.dtype]
) -> tuple[Trace, tuple[int, ...]]:
    cpu = torch.device("cpu")
    named = named_blocks(model, config)
    finest = Interceptor(model, finest_units(model))
    found = survey(model, num_stages, sample, finest, named=named, device=cpu, dtypes=dtypes, count_flops=True)
    trace = found.trace

    def seconds() -> list[float]:
        return measure_seconds(model, found.interceptor, sample, cpu, dtypes)

    costs = unit_costs(model, trace, config.balance, seconds)
    cut = choose_cut(model, trace, found.anatomy.blocks, num_stages, config, costs)
    return trace, assign_stages(trace, cut)


def shared_parameters(stages: Sequence[StageSummary]) -> dict[str, tuple[int, ...]]:
    """The parameters that more than one stage holds, with these stages: tied weights, and units called on several."""
    holders: dict[str, list[int]] = {}
    for summary in stages:
        for name in summary.parameters:
            holders.setdefault(name, []).append(summary.stage)
    return {name: tuple(at) for name, at in holders.items() if len(at) > 1}
