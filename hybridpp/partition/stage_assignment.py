"""Which stage runs each unit of a model, and which stages hold each parameter."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from hybridpp.cluster import get_dist_logger
from hybridpp.config import PartitionConfig
from hybridpp.errors import PartitionError
from hybridpp.module_adapter import AdapterLayer, ModuleAdapter
from hybridpp.nn import walk
from hybridpp.partition.absent import ParameterVisibility
from hybridpp.partition.blocks import find_units
from hybridpp.partition.calls import BufferKind, CallArguments, Trace, UnitCall
from hybridpp.partition.cut import CutCriteria, choose_cut
from hybridpp.partition.intercept import Interceptor
from hybridpp.partition.measure import measure_seconds, unit_costs
from hybridpp.partition.memory import MemoryBudget, imbalance
from hybridpp.partition.plan import (
    BoundarySharding,
    CutPoint,
    assign_stages,
    fitting_cut,
    held_by_stage,
    owners,
    stage_plan,
    unit_homes,
    uses,
)
from hybridpp.partition.plan_cache import Plans
from hybridpp.partition.prune import parameter_names, prune_parameters
from hybridpp.partition.recompute import blocks_by_stage
from hybridpp.partition.requested_cut import check_single_stage, is_requested, named_blocks
from hybridpp.partition.staging_options import StagingOptions
from hybridpp.partition.trace import Tracer
from hybridpp.partition.traced_units import TracedUnits, first_that_runs, first_traceable_sample


@dataclass(frozen=True, kw_only=True)
class StageAssignment:
    """A model's units and parameters, assigned to stages. Every rank derives the same one.

    Attributes:
        interceptor: of the units.
        blocks: the blocks of each stage.
        owners: the stages that hold each parameter, by its name.
        callers: the stages that call each unit, by its name; empty for a model of one stage.
        homes: the stages that hold each unit, by its name; empty for a model of one stage.
        tracer: traces the forward for other inputs; None: there is one stage.
        cut: after which calls the stages end.
        written_buffers: the kinds of buffers to which units write.
    """

    interceptor: Interceptor
    blocks: Sequence[Sequence[str]]
    owners: dict[str, tuple[int, ...]]
    callers: dict[str, set[int]]
    homes: dict[str, set[int]]
    tracer: Tracer | None = None
    cut: tuple[CutPoint, ...] = ()
    written_buffers: frozenset[BufferKind] = frozenset()

    def prune(
        self, adapter: ModuleAdapter, own_stages: Sequence[int], device: torch.device, dtypes: Mapping[int, torch.dtype]
    ) -> ParameterVisibility:
        """Take from the model what no stage of this rank owns: see :func:`prune_parameters`."""
        for name, stages in self.owners.items():
            if not set(stages).intersection(own_stages):
                holder = walk.submodule(adapter.model, name.rpartition(".")[0])
                adapter.noted(holder, "parameters pruned for other stages", undo=None)
        foreign = {unit for unit, stages in self.homes.items() if not stages & set(own_stages)}
        return prune_parameters(adapter.model, self.owners, own_stages, foreign, device, dtypes, self.written_buffers)

    def plans(self, own_stages: Sequence[int], arguments: CallArguments, sharding: BoundarySharding | None) -> Plans:
        """The plans of this rank's stages for such arguments, which are traced; for two stages or more.

        Raises:
            PartitionError: the forward deviates from the one that the model was cut by.
        """
        assert self.tracer is not None, "a model of one stage is not traced"
        trace, stages = _traced(self.tracer, arguments, self.cut, self.callers)
        _refuse_state(trace, len(own_stages))
        for name, needed in uses(trace, stages).items():
            missing = needed - set(self.owners[name])
            if missing:
                raise PartitionError(
                    f"for this input, stage {min(missing)} needs parameter {name!r}, which was given to stage "
                    f"{self.owners[name][0]} at boost. Show boost a batch of each kind: samples=[one, another]. What "
                    "the forward uses in training or in evaluation alone (a penalty of weights) must be in both: "
                    "multiply it by 0 in the other."
                )
        return {stage: stage_plan(trace, stages, stage, sharding) for stage in own_stages}


def one_stage(adapter: ModuleAdapter, staging: StagingOptions) -> StageAssignment:
    """Everything on one stage.

    Raises:
        PartitionError: the user requests a cut, or the parameters exceed the memory limit.
    """
    model = adapter.model
    held: dict[str, tuple[int, ...]] = dict.fromkeys(parameter_names(model), (0,))
    check_single_stage(staging.partition)
    _budget(model, 1, staging).check([set(held)])
    units = find_units(model, 1)
    interceptor = Interceptor(adapter, AdapterLayer.STAGE, units.units)
    return StageAssignment(interceptor=interceptor, blocks=[list(units.blocks)], owners=held, callers={}, homes={})


def cut_into_stages(
    adapter: ModuleAdapter,
    num_stages: int,
    samples: Sequence[CallArguments],
    finest: Interceptor,
    *,
    prepare: Callable[[tuple[Any, ...], dict[str, Any]], CallArguments],
    device: torch.device,
    staging: StagingOptions,
    further: Sequence[Sequence[CallArguments]] = (),
) -> StageAssignment:
    """Trace a model and cut it, for two stages or more.

    Args:
        adapter: of the model.
        num_stages: stages of the pipeline.
        samples: arguments of micro-batches; the first one that the forward runs on counts.
        finest: interceptor of its finest units.
        prepare: brings arguments to the device and dtype that the forward computes with.
        device: where it computes.
        staging: where to cut.
        further: arguments of micro-batches of other kinds, of each kind as ``samples``. The cut is that of the first
            kind; a stage holds what any kind uses there.

    Raises:
        PartitionError: the model cannot be cut into ``num_stages``, or the cut does not fit a further kind.
    """
    model, config = adapter.model, staging.partition
    sample, found = first_traceable_sample(
        adapter,
        num_stages,
        samples,
        prepare,
        finest,
        named=named_blocks(model, config),
        device=device,
        dtypes=staging.dtypes,
        count_flops=config.balance == "flops",
        common=staging.common,
    )
    trace, blocks = found.trace, found.units.blocks
    cut = _choose_cut(model, found, sample, num_stages, device, staging)
    stages = assign_stages(trace, cut)
    stages_per_rank = num_stages // len(set(staging.ranks or range(num_stages)))
    if trace.left:
        _refuse_state(found.tracer.trace(*sample, cuts=cut), stages_per_rank)
    calls = list(zip(trace.calls, stages, strict=True))
    needed, written = uses(trace, stages), trace.written_buffers
    for kind in further:
        traced = partial(_traced, found.tracer, cut=cut, callers=_callers(found, calls))
        _, (other, stages_of_other) = first_that_runs(kind, prepare, traced)
        _refuse_state(other, stages_per_rank)
        written |= other.written_buffers
        calls += zip(other.calls, stages_of_other, strict=True)
        for name, at in uses(other, stages_of_other).items():
            needed[name] = needed.get(name, set()) | at
    kinds = {unit: type(walk.submodule(model, unit)) for unit in found.interceptor.units}
    homes = unit_homes(kinds, calls)
    held = owners(needed, parameter_names(model), homes)
    by_stage = held_by_stage(held, num_stages)
    # The cut was chosen by what the first kind uses.
    _budget(model, num_stages, staging).check(by_stage)
    _warn_of_imbalance(model, by_stage, config)
    return StageAssignment(
        interceptor=found.interceptor,
        blocks=blocks_by_stage([call for call, _ in calls], [stage for _, stage in calls], blocks, num_stages),
        owners=held,
        callers=_callers(found, calls),
        homes=homes,
        tracer=found.tracer,
        cut=cut,
        written_buffers=written,
    )


def _traced(
    tracer: Tracer, arguments: CallArguments, cut: tuple[CutPoint, ...], callers: Mapping[str, set[int]]
) -> tuple[Trace, tuple[int, ...]]:
    """A trace of a forward that may leave out units, and the stage of each call."""
    trace = tracer.trace(*arguments, cuts=cut)
    fitting = fitting_cut(trace, cut, callers)
    if fitting != cut:
        # What a stage leaves and resets depends on where it leaves the forward.
        trace = tracer.trace(*arguments, cuts=fitting)
    return trace, assign_stages(trace, fitting)


def _choose_cut(
    model: nn.Module,
    found: TracedUnits,
    sample: CallArguments,
    num_stages: int,
    device: torch.device,
    staging: StagingOptions,
) -> tuple[CutPoint, ...]:
    def seconds() -> list[float]:
        # One rank's clock decides, or the ranks would choose different cuts.
        return staging.broadcast(measure_seconds(model, found.interceptor, sample, device, staging.dtypes))

    costs = unit_costs(model, found.trace, staging.partition.balance, seconds)
    criteria = CutCriteria(costs, _budget(model, num_stages, staging))
    return choose_cut(model, found.trace, found.units.blocks, num_stages, staging.partition, criteria)


def _budget(model: nn.Module, num_stages: int, staging: StagingOptions) -> MemoryBudget:
    spec, dtypes = staging.state_spec, staging.dtypes
    sizes = {name: spec.bytes_of(p, dtypes.get(id(p), p.dtype)) for name, p in walk.named_parameters(model)}
    return MemoryBudget(sizes=sizes, ranks=staging.ranks or range(num_stages), limit=staging.partition.limit_bytes)


def _refuse_state(trace: Trace, stages_per_rank: int) -> None:
    """Refuse state between forwards where a rank runs container code several times for one micro-batch.

    But for attributes that get another value: of those each stage has its own (:class:`StageStates`).

    Raises:
        PartitionError: there is other such state.
    """
    shared = [key for key in trace.left_by_containers if key not in trace.replaced]
    if stages_per_rank > 1 and shared:
        module, name = shared[0]
        holder = repr(module) if module else "the model"
        raise PartitionError(
            f"the forward reads the attribute {name!r} of {holder} that the forward before has left, and each rank "
            f"runs {stages_per_rank} stages: the code that changes it in place would do so as often for one "
            "micro-batch. Set the attribute to a new value instead (of a buffer, that is refused, too), keep it in the "
            "block that reads it, or use a schedule with one stage for each rank."
        )


def _callers(found: TracedUnits, calls: Sequence[tuple[UnitCall, int]]) -> dict[str, set[int]]:
    callers: dict[str, set[int]] = {unit: set() for unit in found.interceptor.units}
    for call, stage in calls:
        for unit in (call.name, *call.others):
            callers[unit].add(stage)
    return callers


def _warn_of_imbalance(model: nn.Module, held: Sequence[set[str]], config: PartitionConfig) -> None:
    """Warn of an uneven number of parameters, unless the user chose the cut."""
    numbers = {name: parameter.numel() for name, parameter in walk.named_parameters(model)}
    found = imbalance(held, numbers)
    if found is None or config.balance == "parameters" or is_requested(model, config):
        return
    stage, times = found
    get_dist_logger().warning(
        f"stage {stage} of {type(model).__name__} holds {times:.1f} times as many parameters as the mean of "
        f"the {len(held)} stages, because that balances {config.balance} best. Where memory is "
        'short, use balance="parameters", memory_limit= or layers_per_stage=.',
        ranks=[0],
    )
