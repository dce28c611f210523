"""Set up a boosted model: shard it, place it on this rank, wrap the optimizer, create the engine."""

from collections.abc import Callable, Collection
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hybridpp.checkpoint import derive_buffers
from hybridpp.cluster import get_dist_logger
from hybridpp.config import Precision
from hybridpp.data_parallel import GradientBuckets, RunningStatistics
from hybridpp.module_adapter import ModuleAdapter
from hybridpp.nn import walk
from hybridpp.nn.fp32_products import adds_products
from hybridpp.partition import StagedModel, compile_blocks, compiled_parts
from hybridpp.pipeline import DeviceMarks, Executor, Transport, compile_keywords, makes_cuda_graphs
from hybridpp.plan_search import RunFormats
from hybridpp.plugin import Boosted
from hybridpp.precision import ModuleDtypes, find_module_dtypes, fp32_norms, refuse_conversions, torch_dtype
from hybridpp.tensor_parallel import sharding_of
from hybridpp_plugins.apply_tp import AppliedTensorParallel, apply_tensor_parallel
from hybridpp_plugins.engine import Engine
from hybridpp_plugins.failed_pass import FailedPass
from hybridpp_plugins.kept_state_check import KeptStateInCalls
from hybridpp_plugins.layout import Layout
from hybridpp_plugins.manual_forward import ManualCallRecorder
from hybridpp_plugins.manual_loss import ManualLosses
from hybridpp_plugins.model_info import (
    SAME_MODEL,
    SAME_WEIGHTS,
    OriginalModelInfo,
    check_optimizer,
    weight_facts,
    with_gradients,
)
from hybridpp_plugins.model_states import ModelStates
from hybridpp_plugins.model_zero_grad import let_model_clear
from hybridpp_plugins.nonfinite_report import NonFiniteDiagnosis
from hybridpp_plugins.optimizer import HybridOptimizer
from hybridpp_plugins.optimizer_locality import (
    StepWatch,
    check_locality,
    indivisible_parameters,
    refuse_own_tensors,
)
from hybridpp_plugins.optimizer_memory import optimizer_memory
from hybridpp_plugins.optimizer_state import RunProgress
from hybridpp_plugins.optimizer_step import GroupSettings, ModelModes, SharedModes
from hybridpp_plugins.place_model import BoostContext, PlacedModel, place_model
from hybridpp_plugins.replica_buffers import replica_buffers
from hybridpp_plugins.schedule_planner import SchedulePlanner
from hybridpp_plugins.set_alike import ComparedFacts, check_alike, sections_of
from hybridpp_plugins.settings import PluginSettings
from hybridpp_plugins.shared_memory import refuse_scripted, refuse_shared_memory, separate_expanded
from hybridpp_plugins.stop_exchange import StopExchange
from hybridpp_plugins.trained_weights import UpdateRules
from hybridpp_plugins.weights_in_loss import WeightsInLoss
from hybridpp_plugins.wrap_optimizer import wrap_optimizer


def boost(parts: Boosted, context: BoostContext, index: int, compared: ComparedFacts) -> Engine:
    """Bring the parts into the layout, in place. Collective: all ranks.

    Args:
        parts: of the script.
        context: what the plugin knows.
        index: numbers a job's models.
        compared: the settings, which all ranks must have alike.
    """
    (model, optimizer), (settings, layout, planner, device, find_samples, rollback) = parts[:2], context
    seed = torch.initial_seed() + index
    original = OriginalModelInfo.of(model)
    module_dtypes = _module_dtypes(model, settings, device)
    if optimizer is not None:
        check_optimizer(optimizer, original.names)
    held = frozenset() if optimizer is None else with_gradients(optimizer)
    refuse_scripted(model, layout, settings.zero)
    refuse_shared_memory(model, settings, layout)
    separate_expanded(model, is_trained=optimizer is not None)
    weights = ComparedFacts(weight_facts(model, seed, original.buffer_names), SAME_WEIGHTS, SAME_MODEL)
    compared_here = [compared, *sections_of(parts, original.names), weights]
    check_alike(layout.control, "in booster.boost, which compares what the ranks boost", compared_here)
    derive_buffers(model)
    adapter = ModuleAdapter(model, before_irreversible=rollback.forget)
    compiled = _compile_blocks(adapter, settings, planner, device)
    formats = RunFormats(settings.precision, module_dtypes, settings.precision_config.fp32_losses, device)
    applied_tp = apply_tensor_parallel(adapter, settings.parallel, layout, find_samples, formats, compiled)
    rules = None if optimizer is None else _update_rules(optimizer, original.names, applied_tp, context)
    num_stages = len(planner.placement)
    state_spec = optimizer_memory(optimizer, settings.precision, settings.zero.among(layout.dp.size), num_stages)
    placed = place_model(adapter, applied_tp, module_dtypes, context, original.uninitialized, state_spec, rules)
    staged, progress = placed.staged, RunProgress(seed)
    staged.part_reads = applied_tp.part_reads
    buckets, boosted = None, None
    if optimizer is not None:
        buckets, boosted = _wrap_optimizer(optimizer, adapter, applied_tp, placed, original, context)
        if staged.gather is not None:
            staged.gather.after_backward, staged.gather.after_move = buckets.launch_unit, buckets.reduce_at_end
            staged.gather.gradients, boosted.own_backward = buckets, staged.gather.own_backward
            boosted.finish_calls = staged.gather.finish_calls
        boosted.progress = progress
        trained = placed.weights.parameters
        boosted.held_before = {name: trained[name] for name in trained if id(trained[name]) in held}
    layout.connect(device, planner.placement)
    transport = Transport(layout.pp, device)
    executor = Executor(staged, transport, device, applied_tp.weight_gradients, applied_tp.in_a_step)
    _tell_watchdog(layout, staged, executor, boosted, device)
    diagnosis = NonFiniteDiagnosis(staged, executor, buckets, layout, device, placed.weights.unsharded)
    if boosted is not None:
        _watch_manual_calls(boosted, staged, diagnosis, context)
    refuse_conversions(adapter)
    statistics = RunningStatistics(model, layout.dp)
    if boosted is not None and buckets is not None:
        shared = SharedModes(model, staged.owners, planner.placement)
        zero_stage = placed.weights.zero.zero_stage
        if zero_stage or layout.grid.pp_size > 1 or any(map(sharding_of, walk.parameters(model))):
            is_elementwise = rules is not None and rules.is_elementwise
            boosted.step_watch = StepWatch(boosted.unwrap(), layout, zero_stage, is_elementwise)
        boosted.group_settings = GroupSettings(boosted.unwrap(), shared, layout.control)
        boosted.manual_losses = ManualLosses(layout.dp, device) if layout.dp.size > 1 else None
        boosted.statistics = statistics
        boosted.rank_progress = layout.world.progress
        held_alike = (*layout.grid.groups("dp"), *layout.grid.groups("tp"))
        boosted.modes = ModelModes(model, buckets.parameters, layout.control, held_alike)
        with_buffers = settings.parallel.broadcast_buffers
        sent = boosted.replica_buffers = replica_buffers(
            model, layout, placed.weights.sharded, with_buffers=with_buffers
        )
        boosted.stop_exchange = StopExchange(
            layout, boosted.group_settings, boosted.calls, boosted.modes, boosted.manual_losses, sent
        )
        if layout.world.size > 1 and layout.pp.size == 1:
            boosted.failed_pass = FailedPass(layout)
            staged.around_call = boosted.failed_pass.around(staged.around_call)
        has_none = placed.weights.sharded is not None
        if has_none or layout.tp.size > 1:
            boosted.weights_in_loss = WeightsInLoss(model, applied_tp.summed, has_none=has_none)
            staged.around_call = boosted.weights_in_loss.around(staged.around_call)
        if applied_tp.ways_check is not None:
            staged.around_call = applied_tp.ways_check.around(staged.around_call, lambda: boosted.applied_steps)
        if boosted.replica_buffers is not None:
            staged.around_call = boosted.replica_buffers.around(staged.around_call)
        if boosted.manual_losses is not None:
            assert staged.around_call is not None, "it explains errors, at least"
            staged.around_call = boosted.manual_losses.around(staged.around_call, model)
            staged.around_call = KeptStateInCalls(model, layout.dp.size).around(staged.around_call)
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
        weights=placed.weights,
        original=original,
        module_dtypes=module_dtypes,
        statistics=statistics,
        ways_check=applied_tp.ways_check,
    )
    if placed.weights.sharded is not None or max(layout.tp.size, layout.pp.size) > 1:
        ModelStates(model, original.dtypes, layout.tp.rank, placed.weights).put(adapter)
    if boosted is not None and not boosted.exposes_grad:
        let_model_clear(adapter, boosted)
    return engine


def _tell_watchdog(
    layout: Layout, staged: StagedModel, executor: Executor, boosted: HybridOptimizer | None, device: torch.device
) -> None:
    """Tell this rank's progress where it traces and updates weights, and how far its device is, if it is watched."""
    watched, name = layout.world.progress, type(staged.model).__name__
    staged.while_tracing = partial(watched.inside, "setup", lambda: f"tracing {name}")
    if boosted is not None:
        updates = f"optimizer.step of {name}"
        boosted.while_updating = partial(watched.inside, "step", lambda: updates + boosted.after_calls)
    if watched.is_watched and device.type == "cuda":
        executor.marks = watched.device = DeviceMarks(layout.pp.ranks, torch.cuda.Event)


def _compile_blocks(
    adapter: ModuleAdapter, settings: PluginSettings, planner: SchedulePlanner, device: torch.device
) -> Collection[nn.Module]:
    """Compile the blocks, if wanted; returns the modules in them whose weight gradients this library computes."""
    adapter.expect_compiled(compiled_parts(adapter.model))
    if not settings.compile.is_on:
        return ()
    keywords = settings.compile.keywords(full_graph=settings.parallel.tp_size == 1)
    if planner.splits_backward:
        return compile_blocks(adapter, compile_keywords(keywords), device)
    inside = compile_blocks(adapter, keywords, device)
    half = torch_dtype(settings.precision)
    fuses = half is not None and settings.optimizer.fused_weight_gradients and adds_products(device, half)
    # Operators of the library would keep the compiler from making CUDA graphs.
    return inside if fuses and not makes_cuda_graphs(keywords) else ()


def _update_rules(
    optimizer: Optimizer, names: dict[int, str], applied_tp: AppliedTensorParallel, context: BoostContext
) -> UpdateRules:
    """How weights are updated. Call it after sharding, before the model is cut.

    Raises:
        ConfigError: the optimizer's updates would depend on the layout.
    """
    settings, layout = context.settings, context.layout
    zero, indivisible = settings.zero.among(layout.dp.size), frozenset[str]()
    is_sharded = any(sharding_of(parameter) for group in optimizer.param_groups for parameter in group["params"])
    refuse_own_tensors(optimizer, layout, zero, settings.precision, is_sharded)
    is_elementwise = check_locality(optimizer, names, layout, context.device)
    if settings.zero.zero_stage and not zero.zero_stage:
        get_dist_logger().info(
            f"zero_stage={settings.zero.zero_stage} divides nothing: there is one replica (dp_size=1), or zero_size=1.",
            ranks=[0],
        )
    if zero.zero_stage:
        indivisible = indivisible_parameters(optimizer, names, zero.zero_stage, layout, context.device)
        is_elementwise = not indivisible
    return UpdateRules(settings.optimizer, zero, indivisible, applied_tp.summed, is_elementwise)


def _wrap_optimizer(
    optimizer: Optimizer,
    adapter: ModuleAdapter,
    applied_tp: AppliedTensorParallel,
    placed: PlacedModel,
    original: OriginalModelInfo,
    context: BoostContext,
) -> tuple[GradientBuckets, HybridOptimizer]:
    """The optimizer, and the buckets that the gradients of its parameters add up in."""
    buckets, boosted = wrap_optimizer(
        optimizer,
        original.names,
        adapter,
        placed.weights,
        applied_tp.summed,
        context.settings,
        context.layout,
    )
    boosted.uninitialized = original.uninitialized
    if placed.function_casts:
        boosted.recompute_context = placed.function_casts.recompute_context
    applied_tp.weight_gradients.attach_sink(buckets.outside())
    if context.planner.splits_backward:
        get_dist_logger().info(applied_tp.weight_gradients.report(), ranks=[0])
    return buckets, boosted


def _watch_manual_calls(
    boosted: HybridOptimizer, staged: StagedModel, diagnosis: NonFiniteDiagnosis, context: BoostContext
) -> None:
    """Go around the script's own calls of the model: record them, and name weights of another dtype if they fail."""
    precision = context.settings.precision
    # Recorded calls hold memory: in fp32 and bf16 only if error_if_nonfinite is set.
    if precision is Precision.FP16 or context.settings.optimizer.error_if_nonfinite is not None:
        boosted.manual_calls = ManualCallRecorder(
            context.device, lambda: boosted.nonfinite_steps.may_search, diagnosis.diagnose_calls
        )
        staged.around_call = boosted.manual_calls.run
    staged.around_call = _Explained(boosted, staged.model, staged.around_call)


def _module_dtypes(model: nn.Module, settings: PluginSettings, device: torch.device) -> ModuleDtypes:
    half = torch_dtype(settings.precision)
    in_fp32 = fp32_norms(model, settings.precision_config.fp32_norms, device.type) if half else ()
    return find_module_dtypes(model, settings.precision_config.fp32_modules, half, in_fp32)


class _Explained:
    """Wraps the script's own calls of the model: they see what was written to fp32 copies of the weights.

    Torch's error about dtypes says nothing of weights, so it is explained.

    Args:
        boosted: knows the dtypes of the weights; None: of a copy, whose weights nothing updates.
        model: the user's.
        around: what surrounds the calls anyway; None: nothing does.
    """

    def __init__(self, boosted: HybridOptimizer | None, model: nn.Module, around: Callable[..., Any] | None):
        self._boosted, self._model, self._around = boosted, model, around

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Explained":
        """Of a copy of the model: no optimizer updates its weights, so nothing is recorded, or kept alive, for one."""
        return _Explained(None, deepcopy(self._model, memo), None)

    def __call__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._boosted is not None:
            self._boosted.target.take_over()
        try:
            with nullcontext() if self._boosted is None else self._boosted.checked_call(self._model):
                return self._around(forward, args, kwargs) if self._around else forward(*args, **kwargs)
        except RuntimeError:
            if self._boosted is not None:
                self._boosted.target.check(self._model)
            raise
