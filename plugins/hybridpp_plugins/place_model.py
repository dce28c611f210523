"""Place a model on this rank: cut it, and bring this rank's part to its device and dtypes."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch

from hybridpp.checkpoint import allocate
from hybridpp.cluster import DrawMonitor, gather_objects
from hybridpp.config import Precision
from hybridpp.module_adapter import ModuleAdapter
from hybridpp.nn import walk
from hybridpp.nn.torch_private import apply_to_tensors
from hybridpp.partition import (
    CommonTraces,
    StagedModel,
    StagingOptions,
    TrainingStateSpec,
    finest_units,
    has_compiled_forward,
)
from hybridpp.pipeline import call_arguments
from hybridpp.precision import (
    FunctionCasts,
    ModuleDtypes,
    cast_model,
    dtype_changes,
    torch_dtype,
    working_dtype,
    wrap_dtype_boundaries,
)
from hybridpp_plugins.apply_tp import AppliedTensorParallel
from hybridpp_plugins.layout import Layout
from hybridpp_plugins.rollback import Rollback
from hybridpp_plugins.sample import NO_SAMPLES, Samples
from hybridpp_plugins.schedule_planner import SchedulePlanner
from hybridpp_plugins.settings import PluginSettings
from hybridpp_plugins.trained_weights import TrainedWeights, UpdateRules, trained_weights
from hybridpp_plugins.uninitialized import UninitializedWeights


class BoostContext(NamedTuple):
    """What a plugin boosts its models for.

    Attributes:
        settings: of the plugin.
        layout: this rank's groups.
        planner: says which rank runs each stage.
        device: where this rank computes.
        find_samples: gives batches that the model can be called with.
        rollback: puts the model and the optimizer back.
    """

    settings: PluginSettings
    layout: Layout
    planner: SchedulePlanner
    device: torch.device
    find_samples: Callable[[], Samples]
    rollback: Rollback


class PlacedModel(NamedTuple):
    """This rank's part of a model.

    Attributes:
        staged: its stages.
        weights: those that this rank trains, and their masters.
        function_casts: casts around functions in half precision; None in fp32.
    """

    staged: StagedModel
    weights: TrainedWeights
    function_casts: FunctionCasts | None


class _Working(NamedTuple):
    """The model's dtypes: its working dtype, modules in another dtype, casts around functions; and state per weight."""

    dtype: torch.dtype | None
    module_dtypes: ModuleDtypes
    function_casts: FunctionCasts | None
    state_spec: TrainingStateSpec


def place_model(
    adapter: ModuleAdapter,
    applied_tp: AppliedTensorParallel,
    module_dtypes: ModuleDtypes,
    context: BoostContext,
    uninitialized: UninitializedWeights,
    state_spec: TrainingStateSpec,
    rules: UpdateRules | None,
) -> PlacedModel:
    """Cut a sharded model, and bring this rank's part to its device and dtypes. Collective: all ranks.

    Args:
        adapter: of the model.
        applied_tp: how it is sharded.
        module_dtypes: modules in another dtype than the rest.
        context: what it is placed for.
        uninitialized: weights without values.
        state_spec: what training keeps for each weight.
        rules: of the update; None: the model is not trained.
    """
    model, settings = adapter.model, context.settings
    half = torch_dtype(settings.precision)
    wrap_dtype_boundaries(adapter, module_dtypes, half)
    samples = context.find_samples() if len(context.planner.placement) > 1 else NO_SAMPLES
    function_casts = None
    if half:
        compiled = [module for module in walk.modules(model) if has_compiled_forward(module)]
        function_casts = FunctionCasts(adapter, finest_units(model), settings.precision_config.fp32_losses, compiled)
    working = _Working(working_dtype(model, settings.precision), module_dtypes, function_casts, state_spec)
    staged = _cut(adapter, context, working, samples, applied_tp)
    weights = _bring(adapter, staged, working, context, rules)
    allocate(model, weights.masters.masters.values(), context.device)
    uninitialized.watch(adapter, weights.masters, weights.sharded)
    return PlacedModel(staged, weights, function_casts)


def _cut(
    adapter: ModuleAdapter,
    context: BoostContext,
    working: _Working,
    samples: Samples,
    applied_tp: AppliedTensorParallel,
) -> StagedModel:
    model, settings, layout, placement = adapter.model, context.settings, context.layout, context.planner.placement
    staging = StagingOptions(
        compute_dtype=working.dtype,
        dtypes=dtype_changes(model, working.dtype, working.module_dtypes),
        partition=settings.partition,
        recomputation=settings.pipeline.recomputation,
        broadcast=lambda seconds: list(
            gather_objects(layout.control, "in booster.boost, which measures the blocks", seconds)[0]
        ),
        recompute_context=working.function_casts.recompute_context if working.function_casts else nullcontext,
        boundary_sharding=applied_tp.between_stages,
        # A copy of the model (averaged weights) copies this, which a read-only mapping refuses.
        sequence_blocks=dict(applied_tp.sequence_blocks),
        state_spec=working.state_spec,
        ranks=placement,
        draws=applied_tp.draws or DrawMonitor(),
        common=_common_traces(context, working),
    )
    own_stages = [stage for stage, rank in enumerate(placement) if rank == layout.here.pp]
    calls, *further = ([call_arguments(batch) for batch in kind] for kind in samples.kinds)
    with samples.explained(model):
        return StagedModel(
            adapter,
            len(placement),
            own_stages,
            device=context.device,
            samples=calls,
            further=further,
            staging=staging,
        )


def _common_traces(context: BoostContext, working: _Working) -> CommonTraces | None:
    """The traces of the in-process ranks that hold the same shards. Every rank of the world calls it."""
    layout, settings, parallel = context.layout, context.settings, context.settings.parallel
    # What the layers on the model depend on. Where it is cut, and into how many stages, is a part of each trace's key.
    layers = (
        (parallel.tp_size, parallel.tensor_parallel_plan, parallel.enable_sequence_parallelism),
        (settings.precision, settings.precision_config, settings.optimizer.fused_weight_gradients),
        (settings.compile, settings.optimize_kernels, context.planner.splits_backward),
    )
    results = layout.world.common_results((layout.here.tp, repr(layers)))
    if results is None:
        return None
    return CommonTraces(results, (working.function_casts,) if working.function_casts else ())


def _bring(
    adapter: ModuleAdapter, staged: StagedModel, working: _Working, context: BoostContext, rules: UpdateRules | None
) -> TrainedWeights:
    """Bring the model to its device and dtypes; returns the weights that are trained, and their masters."""
    model, precision, device = adapter.model, context.settings.precision, context.device
    # As model.to, except for tensors without values: their memory is allocated last, in the final dtype.
    apply_to_tensors(model, lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    # Masters have the values before the cast.
    trainable = {name: parameter for name, parameter in walk.named_parameters(model) if parameter.requires_grad}
    values = {} if precision is Precision.FP32 else {name: one.detach() for name, one in trainable.items()}
    cast_model(adapter, working.dtype, working.module_dtypes)
    return trained_weights(staged, values, precision, rules, context.layout, context.planner.placement, device)
