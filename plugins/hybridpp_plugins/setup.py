"""Set up a boosted model: shard, cut and cast the model, wrap the optimizer, create the engine."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from hybridpp.checkpoint import allocate, derive_buffers
from hybridpp.cluster import gather_objects, get_dist_logger
from hybridpp.config import Precision
from hybridpp.data_parallel import GradientBuckets, RunningStatistics
from hybridpp.module_adapter import ModuleAdapter
from hybridpp.nn.torch_private import apply_to_tensors
from hybridpp.partition import BoundarySharding, StagedModel, StagingOptions, TrainingStateSpec, finest_units
from hybridpp.pipeline import Executor, Transport, call_arguments
from hybridpp.plugin import Boosted
from hybridpp.precision import (
    FunctionCasts,
    MasterWeights,
    ModuleDtypes,
    cast_model,
    dtype_changes,
    find_module_dtypes,
    norm_modules,
    torch_dtype,
    working_dtype,
    wrap_dtype_boundaries,
)
from hybridpp_plugins.apply_tp import AppliedTensorParallel, apply_tensor_parallel
from hybridpp_plugins.engine import Engine
from hybridpp_plugins.grad_access_warning import GradAccessWarning
from hybridpp_plugins.layout import Layout
from hybridpp_plugins.manual_forward import ManualCallRecorder
from hybridpp_plugins.model_info import OriginalModelInfo, check_optimizer, check_same_weights
from hybridpp_plugins.nonfinite_report import NonFiniteDiagnosis
from hybridpp_plugins.optimizer import HybridOptimizer
from hybridpp_plugins.optimizer_locality import check_locality
from hybridpp_plugins.optimizer_memory import optimizer_memory
from hybridpp_plugins.optimizer_state import RunProgress
from hybridpp_plugins.sample import NO_SAMPLES, Samples
from hybridpp_plugins.schedule_planner import SchedulePlanner
from hybridpp_plugins.settings import PluginSettings
from hybridpp_plugins.uninitialized import UninitializedWeights
from hybridpp_plugins.wrap_optimizer import wrap_optimizer


class _Working(NamedTuple):
    """The model's dtypes: its working dtype, modules in another dtype, casts around functions; and state per weight."""

    dtype: torch.dtype | None
    module_dtypes: ModuleDtypes
    function_casts: FunctionCasts | None
    state_spec: TrainingStateSpec


class _LaidOut(NamedTuple):
    """A model after sharding and cutting.

    Attributes:
        staged: its stages.
        working: its dtypes.
        masters: fp32 masters of its weights.
    """

    staged: StagedModel
    working: _Working
    masters: MasterWeights


class BoostContext(NamedTuple):
    """What a plugin boosts its models for.

    Attributes:
        settings: of the plugin.
        layout: this rank's groups.
        planner: says which rank runs each stage.
        device: where this rank computes.
        find_samples: gives batches that the model can be called with.
    """

    settings: PluginSettings
    layout: Layout
    planner: SchedulePlanner
    device: torch.device
    find_samples: Callable[[], Samples]


def boost(parts: Boosted, context: BoostContext, index: int) -> Engine:
    """Bring the parts into the layout, in place; ``index`` numbers a job's models. Collective: all ranks."""
    (model, optimizer), (settings, layout, planner, device, find_samples) = parts[:2], context
    seed = torch.initial_seed() + index
    original = OriginalModelInfo.of(model)
    module_dtypes = _module_dtypes(model, settings)
    if optimizer is not None:
        check_optimizer(optimizer, original.names)
    check_same_weights(model, seed, layout.control)
    derive_buffers(model)
    adapter = ModuleAdapter(model)
    applied_tp = apply_tensor_parallel(adapter, settings.parallel, layout, find_samples)
    if optimizer is not None:
        check_locality(optimizer, original.names, layout, device)
    state_spec = optimizer_memory(optimizer, settings.precision)
    laid_out = _lay_out(adapter, applied_tp, module_dtypes, context, original.uninitialized, state_spec)
    staged, progress = laid_out.staged, RunProgress(seed)
    buckets, boosted = None, None
    if optimizer is not None:
        buckets, boosted = _wrap_optimizer(optimizer, adapter, applied_tp, laid_out, original, context)
        boosted.progress = progress
    transport = Transport(layout.activations, layout.gradients, device)
    executor = Executor(staged, transport, device, applied_tp.weight_gradients, applied_tp.in_a_step)
    diagnosis = NonFiniteDiagnosis(staged, executor, buckets, layout, device)
    if boosted is not None:
        _watch_manual_calls(boosted, staged, diagnosis, context)
    statistics = RunningStatistics(model, layout.dp)
    if boosted is not None:
        boosted.statistics = statistics
    engine = Engine(
        adapter=adapter,
        staged=staged,
        layout=layout,
        pipeline=settings.pipeline,
        planner=planner,
        device=device,
        progress=progress,
        executor=executor,
        diagnosis=diagnosis,
        optimizer=boosted,
        buckets=buckets,
        masters=laid_out.masters,
        original=original,
        module_dtypes=module_dtypes,
        statistics=statistics,
    )
    if boosted is not None and settings.precision is not Precision.FP32:
        boosted.grad_access_warning.watch(adapter, lambda: engine.is_running)
    return engine


def _wrap_optimizer(
    optimizer: Optimizer,
    adapter: ModuleAdapter,
    applied_tp: AppliedTensorParallel,
    laid_out: _LaidOut,
    original: OriginalModelInfo,
    context: BoostContext,
) -> tuple[GradientBuckets, HybridOptimizer]:
    """The optimizer, and the buckets that the gradients of its parameters add up in."""
    planner = context.planner
    ranks_of_parameter = {
        n: tuple(sorted({planner.placement[s] for s in stages})) for n, stages in laid_out.staged.owners.items()
    }
    buckets, boosted = wrap_optimizer(
        optimizer,
        original.names,
        adapter,
        ranks_of_parameter,
        applied_tp.summed,
        laid_out.masters,
        context.settings,
        context.layout,
    )
    boosted.uninitialized = original.uninitialized
    if laid_out.working.function_casts:
        boosted.recompute_context = laid_out.working.function_casts.recompute_context
    applied_tp.weight_gradients.attach_sink(buckets)
    if planner.splits_backward:
        get_dist_logger().info(applied_tp.weight_gradients.report(), ranks=[0])
    return buckets, boosted


def _watch_manual_calls(
    boosted: HybridOptimizer, staged: StagedModel, diagnosis: NonFiniteDiagnosis, context: BoostContext
) -> None:
    """Go around the script's own calls of the model: record them, and let the model list its own parameters."""
    precision = context.settings.precision
    # Recorded calls hold memory: in fp32 and bf16 only if error_if_nonfinite is set.
    if precision is Precision.FP16 or context.settings.optimizer.error_if_nonfinite is not None:
        boosted.manual_calls = ManualCallRecorder(
            context.device, lambda: boosted.nonfinite_steps.may_search, diagnosis.diagnose_calls
        )
        staged.around_call = boosted.manual_calls.run
    if precision is not Precision.FP32:
        staged.around_call = _quietly(boosted.grad_access_warning, staged.around_call)


def _module_dtypes(model: nn.Module, settings: PluginSettings) -> ModuleDtypes:
    in_fp32 = norm_modules(model) if settings.precision_config.fp32_norms else set()
    return find_module_dtypes(model, settings.precision_config.fp32_modules, torch_dtype(settings.precision), in_fp32)


def _lay_out(
    adapter: ModuleAdapter,
    applied_tp: AppliedTensorParallel,
    module_dtypes: ModuleDtypes,
    context: BoostContext,
    uninitialized: UninitializedWeights,
    state_spec: TrainingStateSpec,
) -> _LaidOut:
    """Cut the sharded model, and bring this rank's part to its device and dtypes."""
    model, settings = adapter.model, context.settings
    half = torch_dtype(settings.precision)
    wrap_dtype_boundaries(adapter, module_dtypes, half)
    samples = context.find_samples() if len(context.planner.placement) > 1 else NO_SAMPLES
    function_casts = (
        FunctionCasts(adapter, finest_units(model), settings.precision_config.fp32_losses) if half else None
    )
    working = _Working(working_dtype(model, settings.precision), module_dtypes, function_casts, state_spec)
    staged = _cut(adapter, context, working, samples, applied_tp.between_stages)
    masters = _place(adapter, settings.precision, working, context.device, uninitialized)
    return _LaidOut(staged, working, masters)


def _cut(
    adapter: ModuleAdapter,
    context: BoostContext,
    working: _Working,
    samples: Samples,
    parts: BoundarySharding | None,
) -> StagedModel:
    model, settings, layout, placement = adapter.model, context.settings, context.layout, context.planner.placement
    staging = StagingOptions(
        compute_dtype=working.dtype,
        dtypes=dtype_changes(model, working.dtype, working.module_dtypes),
        partition=settings.partition,
        recomputation=settings.pipeline.recomputation,
        broadcast=lambda seconds: list(gather_objects(layout.control, seconds)[0]),
        recompute_context=working.function_casts.recompute_context if working.function_casts else nullcontext,
        boundary_sharding=parts,
        state_spec=working.state_spec,
        ranks=placement,
    )
    mine = [stage for stage, rank in enumerate(placement) if rank == layout.here.pp]
    calls = [call_arguments(batch) for batch in samples.batches]
    with samples.explained(model):
        return StagedModel(adapter, len(placement), mine, device=context.device, samples=calls, staging=staging)


def _place(
    adapter: ModuleAdapter,
    precision: Precision,
    working: _Working,
    device: torch.device,
    uninitialized: UninitializedWeights,
) -> MasterWeights:
    """Bring the model to its device and dtypes; returns the masters of its weights."""
    model = adapter.model
    # As model.to, except for tensors without values: their memory is allocated last, in the final dtype.
    apply_to_tensors(model, lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    masters = _masters(model, precision)
    cast_model(adapter, working.dtype, working.module_dtypes)
    allocate(model, masters.masters.values(), device)
    uninitialized.watch(adapter, masters)
    return masters


def _masters(model: nn.Module, precision: Precision) -> MasterWeights:
    """Masters of the trainable weights, before these are cast; frozen weights need none."""
    if precision is Precision.FP32:
        return MasterWeights({})
    return MasterWeights({name: p for name, p in model.named_parameters() if p.requires_grad and p.is_floating_point()})


def _quietly(grad_access_warning: GradAccessWarning, around: Callable[..., Any] | None) -> Callable[..., Any]:
    """Wraps the script's calls of the model, in which the model may list its own parameters."""

    # A function, because copies of the model share it.
    def run(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with grad_access_warning.quiet():
            return around(forward, args, kwargs) if around else forward(*args, **kwargs)

    return run
