"""A model cut into stages as ``boost`` would cut it, without running it."""

from collections.abc import Mapping
from typing import NamedTuple

from hybridpp.nn import walk
from hybridpp.partition import StagePlan, blocks_by_stage, owners, stage_plan, stages_of, unit_homes, uses
from hybridpp_plugins.estimate_runs import EstimateRuns, Traced
from hybridpp_plugins.settings import PluginSettings


class CutModel(NamedTuple):
    """A traced model with the stage of each call.

    Attributes:
        traced: the model.
        plans: of each stage.
        windows: the first and the last call of each stage.
        blocks: of each stage.
        owners: the stages that hold each parameter, by name.
    """

    traced: Traced
    plans: tuple[StagePlan, ...]
    windows: tuple[tuple[int, int], ...]
    blocks: tuple[tuple[str, ...], ...]
    owners: Mapping[str, tuple[int, ...]]


def cut_model(
    runs: EstimateRuns, parsed: PluginSettings, microbatch_size: int, num_stages: int, traced_for: int | None = None
) -> CutModel:
    """Cut a model.

    Args:
        runs: of the model.
        parsed: settings of the plugin.
        microbatch_size: samples.
        num_stages: stages of the pipeline.
        traced_for: number of stages of a trace with the same units; None: ``num_stages``.

    Raises:
        PartitionError: it cannot be cut so.
    """
    parallel = parsed.parallel
    sharded = parallel.tp_size, parallel.enable_sequence_parallelism
    traced = runs.traced(*sharded, microbatch_size, traced_for or num_stages)
    names, trace, blocks = tuple(traced.parameters), traced.found.trace, traced.found.blocks
    if num_stages == 1:
        window = (0, len(trace.calls) - 1)
        return CutModel(traced, (StagePlan(),), (window,), (blocks,), dict.fromkeys(names, (0,)))
    stages = stages_of(traced.model, traced.found, num_stages, parsed.partition)
    plans = tuple(stage_plan(trace, stages, stage, traced.between) for stage in range(num_stages))
    windows = tuple((stages.index(stage), len(stages) - 1 - stages[::-1].index(stage)) for stage in range(num_stages))
    kinds = {unit: type(walk.submodule(traced.model, unit)) for unit in traced.found.units}
    homes = unit_homes(kinds, zip(trace.calls, stages, strict=True))
    by_stage = tuple(tuple(one) for one in blocks_by_stage(trace.calls, stages, blocks, num_stages))
    return CutModel(traced, plans, windows, by_stage, owners(uses(trace, stages), names, homes))
