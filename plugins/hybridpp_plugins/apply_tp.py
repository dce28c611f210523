"""Apply tensor parallelism: sharded layers with deferred weight gradients, gradient sums, gathered tensors."""

import re
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridpp.cluster import DrawMonitor, Group, gather_numbers, get_dist_logger, preserved_random_state
from hybridpp.config import ParallelConfig
from hybridpp.data_parallel import GradientBuckets
from hybridpp.errors import ConfigError
from hybridpp.module_adapter import ModuleAdapter
from hybridpp.nn import walk
from hybridpp.nn.checkpointing import recomputes_saved_tensors
from hybridpp.nn.force_eager import force_eager, has_compiled
from hybridpp.nn.part_reads import PartReadCheck
from hybridpp.partition import BoundarySharding, compiled_parts, find_units
from hybridpp.pipeline import Gradients, SplitBackwardOps, WeightGradients, split_backward_ops
from hybridpp.plan_search import RunFormats, SequencePlan, own_forwards, refused_layers
from hybridpp.sharded_activations import SavedShard
from hybridpp.sharding_plan import Plan, ShardKind, plan_from_patterns
from hybridpp.tensor_parallel import ParameterSharding, ShardedLayer, ShardedModel, run_sequence_parallel, sharding_of
from hybridpp.tensor_parallel import shard as apply_spec
from hybridpp_plugins.apply_sp import ShardsBetweenStages, sequence_plan
from hybridpp_plugins.check_tp_plan import checked_tp_plan, readers_of_parts
from hybridpp_plugins.common_plans import CommonPlans
from hybridpp_plugins.find_tp_plan import find_tp_plan, of_first_rank
from hybridpp_plugins.layout import Layout
from hybridpp_plugins.sample import Samples
from hybridpp_plugins.tp_hook_check import check_hooks_of_blocks
from hybridpp_plugins.tp_ways_check import TensorParallelWaysCheck, sharded_blocks

_NUMBER = r"(?<=\.)\d+(?=[.':]|$)"


class AppliedTensorParallel(NamedTuple):
    """The result of tensor parallelism on a model; with one tensor-parallel rank, no layer is sharded.

    Attributes:
        weight_gradients: runs its layers.
        summed: parameters whose gradients are sums over all ranks that share layers, by name.
        between_stages: shards the values between stages; None: they are sent unsharded.
        in_a_step: the context in which a schedule runs.
        draws: whether the layers draw random numbers.
        sequence_blocks: blocks that run on sequence shards, with the modules inside that must run within the block's
            forward.
        part_reads: refuses code that reads parts of weights; None: no layer is sharded.
        ways_check: looks at what sharded blocks do in the run; None: there are none.
    """

    weight_gradients: WeightGradients
    summed: frozenset[str]
    between_stages: BoundarySharding | None = None
    in_a_step: Callable[[], AbstractContextManager[None]] = nullcontext
    draws: DrawMonitor | None = None
    sequence_blocks: Mapping[str, Collection[str]] = MappingProxyType({})
    part_reads: PartReadCheck | None = None
    ways_check: TensorParallelWaysCheck | None = None


def apply_tensor_parallel(
    adapter: ModuleAdapter,
    config: ParallelConfig,
    layout: Layout,
    find_samples: Callable[[], Samples],
    formats: RunFormats,
    compiled: Collection[nn.Module] = (),
) -> AppliedTensorParallel:
    """Let this rank hold its part of the model's layers; before the model is cut.

    The user's plan says which layers are sharded; without one, a plan is searched. Collective: all ranks.

    Args:
        adapter: of the model.
        config: the plan, and the number of ranks.
        layout: the ranks.
        find_samples: gives batches that the model can be called with.
        formats: in which the model will run.
        compiled: modules in compiled blocks whose weight gradients may be deferred.
    """
    model, tp = adapter.model, layout.tp
    if tp.size == 1:
        return apply_sharding(adapter, None, tp, compiled)
    common = CommonPlans(layout.world.common_results("plans"))
    # What is compiled while function modes of a trial are on may be used in the run; functions that blocks call, too.
    around = force_eager if compiled_parts(model) or has_compiled() else nullcontext
    if config.tensor_parallel_plan is not None:
        plan = plan_from_patterns(model, config.tensor_parallel_plan, tp.size)
        _refuse_layers(model, plan, layout, formats)
        with around():
            plan = checked_tp_plan(model, plan, find_samples, tp.size, layout.control, common, formats)
    else:
        with around():
            plan = find_tp_plan(model, find_samples, tp.size, layout.control, common, formats)
    sequences = SequencePlan()
    if config.enable_sequence_parallelism:
        with around():
            sequences = sequence_plan(model, plan, find_samples, tp.size, layout.control, common, formats)
    if plan.reasons or sequences.reasons or not plan.spec.params:
        get_dist_logger().warning(_replicated_modules(model, plan, sequences), ranks=[0])
    for difference in dict.fromkeys(re.sub(_NUMBER, "*", line) for line in plan.differences):
        get_dist_logger().info(f"tensor parallelism differs from the model's own plan: {difference}", ranks=[0])
    in_compiled = compiled_parts(model)
    names = [name for name in find_units(model, 1).blocks if walk.submodule(model, name) not in in_compiled]
    blocks = sharded_blocks(model, names, plan, sequences)
    applied = apply_sharding(adapter, Sharding(plan, sequences), tp, compiled)
    return applied._replace(ways_check=TensorParallelWaysCheck(blocks, tp) if blocks else None)


def _refuse_layers(model: nn.Module, plan: Plan, layout: Layout, formats: RunFormats) -> None:
    """Refuse layers of the user's plan whose forwards take no shard of them. Collective, if there are candidates."""
    if not own_forwards(model, plan.spec):
        return
    size = layout.tp.size

    def find() -> dict[str, str]:
        with preserved_random_state(torch.device("cpu")):
            return refused_layers(model, plan.spec, size, formats)

    refused = of_first_rank(find, layout.control)
    if refused:
        (name, reason), *others = refused.items()
        raise ConfigError(
            f"tensor_parallel_plan divides layers that cannot compute with a shard: {name!r} is "
            f"{plan.styles[name]!r} over tp_size={size}, and {reason}"
            f"{f'; so are {len(others)} more' if others else ''}. Leave it out of tensor_parallel_plan, or use another "
            "tp_size or precision."
        )


class Sharding(NamedTuple):
    """How a model is sharded over tensor-parallel ranks: its layers, and the sequences between them."""

    plan: Plan
    sequences: SequencePlan


def apply_sharding(
    adapter: ModuleAdapter, sharding: Sharding | None, tp: Group, compiled: Collection[nn.Module] = ()
) -> AppliedTensorParallel:
    """Let this rank hold its part of the model's layers. Nothing is communicated.

    Args:
        adapter: of the model.
        sharding: found before; None: no layer is sharded.
        tp: the ranks that share layers.
        compiled: modules in compiled blocks whose weight gradients may be deferred.
    """
    model = adapter.model
    excluded = compiled_parts(model).difference(compiled)
    if sharding is None:
        return AppliedTensorParallel(WeightGradients(adapter, excluded=excluded, compiled=compiled), frozenset())
    plan, sequences = sharding
    kinds = {module: split_backward_ops(module) for module in walk.modules(model)}
    in_compiled = compiled_parts(model)
    all_blocks = find_units(model, 1).blocks
    blocks = [name for name in all_blocks if walk.submodule(model, name) not in in_compiled]
    sharded = apply_spec(adapter, plan.spec, tp)
    sequence_blocks = {name: run_sequence_parallel(name, block, sharded) for name, block in sequences.blocks.items()}
    summed = sharded.partial_grad | sequences.partial_grad
    readers = readers_of_parts(model, plan.spec, all_blocks, summed)
    check_hooks_of_blocks(adapter, blocks, plan.spec, sequences, summed)
    # Sharded layers in compiled blocks run uncompiled.
    weight_gradients = WeightGradients(
        adapter,
        _operations_of_layers(kinds, sharded),
        excluded.difference(sharded.layers),
        set(compiled).difference(sharded.layers),
    )
    sharded.context.overlap_fn = weight_gradients.run_overlapped
    between = ShardsBetweenStages(sequences.blocks, tp) if sequences.blocks else None
    return AppliedTensorParallel(
        weight_gradients,
        summed,
        between,
        sharded.context.keep_logits_sharded,
        sharded.context.draws,
        sequence_blocks,
        PartReadCheck(model, readers, tp.size),
    )


def _replicated_modules(model: nn.Module, plan: Plan, sequences: SequencePlan) -> str:
    """One line that lists the replicated modules, and why they are replicated."""
    listed: dict[str, int] = {}
    reasons = [*plan.reasons.items(), *((name, f"full sequences, {why}") for name, why in sequences.reasons.items())]
    for name, reason in reasons:
        line = f"{re.sub(_NUMBER, '*', name) or 'all'}: {re.sub(_NUMBER, '*', reason)}"
        listed[line] = listed.get(line, 0) + 1
    lines = "; ".join(listed) or "the plan names no layer"
    return (
        f"these modules of {type(model).__name__} stay replicated on all tensor-parallel ranks: {lines}. To shard more "
        "layers, name them in tensor_parallel_plan, like {'*.q_proj': 'column', '*.o_proj': 'row'}."
    )


def _operations_of_layers(
    kinds: Mapping[nn.Module, SplitBackwardOps | None], sharding: ShardedModel
) -> dict[nn.Module, SplitBackwardOps]:
    """The operations of the sharded layers."""
    return {
        module: _with_communication(kind, part) for module, part in sharding.layers.items() if (kind := kinds[module])
    }


def _with_communication(kind: SplitBackwardOps, part: ShardedLayer) -> SplitBackwardOps:
    """The operations of a layer kind, combined with the communication of a sharded layer."""

    def forward(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = kind.forward(module, part.local_input(x), weight, None if part.adds_bias else bias)
        return part.combine(y, x, bias)

    def input_gradient(module: nn.Module, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return kind.input_gradient(module, part.local_grad(dy, x), x, weight)

    def weight_gradients(module: nn.Module, dy: Tensor, x: Tensor, weight: Tensor, has_bias: bool) -> Gradients:
        own, local = part.local_grad(dy, x), part.local_input(x)
        gradient, bias_gradient = kind.weight_gradients(module, own, local, weight, has_bias and not part.adds_bias)
        if has_bias and part.adds_bias:
            bias_gradient = part.bias_grad(dy.reshape(-1, dy.shape[-1]).sum(0))
        return gradient, bias_gradient

    def factors(module: nn.Module, dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        assert kind.factors is not None
        return kind.factors(module, part.local_grad(dy, x), part.local_input(x))

    def bias_gradient(module: nn.Module, dy: Tensor, x: Tensor) -> Tensor:
        if part.adds_bias:
            return part.bias_grad(dy.reshape(-1, dy.shape[-1]).sum(0))
        assert kind.bias_gradient is not None
        return kind.bias_gradient(module, part.local_grad(dy, x), part.local_input(x))

    def save_input(x: Tensor, later: bool) -> tuple[Tensor, SavedShard] | None:
        # A recomputed input is used at once, so it is kept gathered, unless it waits for a W action.
        return None if recomputes_saved_tensors() and not later else part.save_input(x)

    return SplitBackwardOps(
        forward,
        input_gradient,
        weight_gradients,
        # Flattened inputs would lose the boundaries between sequences.
        3 if part.scatters_output else kind.input_dims,
        kind.any_dims and not part.scatters_output,
        pre_forward=part.pre_forward,
        post_forward=part.post_forward,
        save_input=save_input if part.kind is ShardKind.COLUMN else None,
        pre_grad=part.pre_grad,
        factors=factors if kind.factors else None,
        bias_gradient=bias_gradient if kind.bias_gradient else None,
        # Two autograd functions for one are worth it where they hide something.
        overlap_comm=part.kind in (ShardKind.COLUMN, ShardKind.GATHERED_COLUMN) and part.context.group.overlaps,
    )


def placements(model: nn.Module) -> dict[str, ParameterSharding]:
    """The sharding of this rank's sharded parameters, by name."""
    shardings = {name: sharding_of(parameter) for name, parameter in walk.named_parameters(model)}
    return {name: sharding for name, sharding in shardings.items() if sharding is not None}


def share_replicated_gradients(
    buckets: GradientBuckets, sharded: Mapping[str, ParameterSharding], layout: Layout
) -> None:
    """All-reduce the gradients of replicated shards over the ranks that hold them.

    Collective: all ranks of the world.
    """
    replicated_views = [
        (name, size, view)
        for name, gradient in buckets.views.items()
        if name in sharded
        for size, view in sharded[name].replicated_views(gradient)
    ]
    own_sizes = {size for _, size, _ in replicated_views}
    # Stages differ in what they hold; the world makes groups together.
    rows = gather_numbers(layout.control, "in booster.boost, which groups replicated shards", sorted(own_sizes))
    sizes = sorted({int(size) for row in rows for size in row})
    groups = {size: layout.group_of_copies(size) for size in sizes}
    for name, size, view in replicated_views:
        buckets.add_shared(name, groups[size], view)


def counts_here(name: str, sharded: Mapping[str, ParameterSharding], tp: Group) -> bool:
    """Whether this rank's shard of a parameter counts in a norm over the tensor-parallel ranks."""
    return sharded[name].counts_on(tp.rank) if name in sharded else tp.rank == 0


def local_state(parameter: nn.Parameter, state: Mapping[str, Any], tp_rank: int) -> dict[str, Any]:
    """This rank's shard of the optimizer state of an unsharded parameter."""
    sharding = sharding_of(parameter)
    if sharding is None:
        return dict(state)
    return {
        key: sharding.take(value, tp_rank)
        if isinstance(value, Tensor) and value.shape == sharding.full_shape
        else value
        for key, value in state.items()
    }
