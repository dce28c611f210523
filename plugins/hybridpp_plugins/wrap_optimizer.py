"""Wrap the user's optimizer for this rank's parameters, and create their gradient buckets."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from functools import partial

from torch import nn
from torch.optim import Optimizer

from hybridpp.config import Precision
from hybridpp.data_parallel import GradientBuckets
from hybridpp.module_adapter import ModuleAdapter
from hybridpp.optim import GlobalGradNorm, fuse_by_default
from hybridpp.precision import MasterWeights, ReplicatedTarget, torch_dtype
from hybridpp.tensor_parallel import ParameterSharding
from hybridpp_plugins.apply_tp import counts_here, local_state, placements, share_replicated_gradients
from hybridpp_plugins.layout import Layout
from hybridpp_plugins.optimizer import HybridOptimizer
from hybridpp_plugins.optimizer_state import OptimizerStateOwner
from hybridpp_plugins.settings import PluginSettings


def wrap_optimizer(
    optimizer: Optimizer,
    names: dict[int, str],
    adapter: ModuleAdapter,
    ranks_of_parameter: Mapping[str, tuple[int, ...]],
    summed: AbstractSet[str],
    masters: MasterWeights,
    settings: PluginSettings,
    layout: Layout,
) -> tuple[GradientBuckets, HybridOptimizer]:
    """Boost an optimizer, in place. Collective: all ranks.

    Args:
        optimizer: the user's.
        names: of the complete model's parameters, by ``id``.
        adapter: of this rank's part of the model.
        ranks_of_parameter: the pipeline positions that hold each of the complete model's parameters.
        summed: parameters whose gradients are summed over the tensor-parallel ranks.
        masters: of the model's weights.
        settings: the plugin's.
        layout: the ranks.
    """
    model = adapter.model
    owned = dict(model.named_parameters())
    _repoint(optimizer, names, owned, masters, layout.tp.rank)
    unfuse = fuse_by_default(optimizer, settings.optimizer.fuses_on)
    trainable = {name: parameter for name, parameter in owned.items() if parameter.requires_grad}
    sharded = placements(model)
    buckets = _buckets(trainable, summed, ranks_of_parameter, sharded, settings, layout)
    for name, parameter in trainable.items():
        adapter.noted(parameter, "hook on its gradient", partial(buckets.release, name))
    norm = _norm(trainable, ranks_of_parameter, sharded, layout)
    owner = OptimizerStateOwner(optimizer, owned, masters, sharded, layout.tp, settings.precision)
    target = ReplicatedTarget(trainable, masters)
    boosted = HybridOptimizer(optimizer, buckets, target, masters, norm, settings.optimizer, settings.precision, owner)
    boosted.on_release = unfuse
    return buckets, boosted


def _repoint(
    optimizer: Optimizer,
    names: dict[int, str],
    owned: dict[str, nn.Parameter],
    masters: MasterWeights,
    tp_rank: int,
) -> None:
    """Replace the optimizer's parameters by this rank's; groups and their settings are kept, even if empty."""
    for group in optimizer.param_groups:
        kept = [index for index, parameter in enumerate(group["params"]) if names[id(parameter)] in owned]
        before = [group["params"][index] for index in kept]
        after = [masters.masters.get(names[id(parameter)], parameter) for parameter in before]
        for parameter in group["params"]:
            state = optimizer.state.pop(parameter, None)
            if state is not None and names[id(parameter)] in owned:
                target = masters.masters.get(names[id(parameter)], parameter)
                optimizer.state[target] = local_state(parameter, state, tp_rank)
        group["params"] = after
        if "param_names" in group:
            group["param_names"] = [group["param_names"][index] for index in kept]


def restore_optimizer(optimizer: Optimizer, masters: MasterWeights, parameters: Mapping[str, nn.Parameter]) -> None:
    """Let an optimizer that was boosted work on the parameters of the unsharded model again, with its state.

    Args:
        optimizer: the user's.
        masters: fp32 masters that it worked on, if any.
        parameters: of the model, by name.
    """
    originals = {id(master): parameters[name] for name, master in masters.masters.items()}
    for group in optimizer.param_groups:
        for target in group["params"]:
            if id(target) in originals and target in optimizer.state:
                optimizer.state[originals[id(target)]] = optimizer.state.pop(target)
        group["params"] = [originals.get(id(target), target) for target in group["params"]]


def _buckets(
    trainable: Mapping[str, nn.Parameter],
    summed: AbstractSet[str],
    ranks_of_parameter: Mapping[str, tuple[int, ...]],
    sharded: Mapping[str, ParameterSharding],
    settings: PluginSettings,
    layout: Layout,
) -> GradientBuckets:
    groups = layout.groups_within_pipelines(sorted({ranks for ranks in ranks_of_parameter.values() if len(ranks) > 1}))
    shared = {name: [groups[ranks_of_parameter[name]]] for name in trainable if len(ranks_of_parameter[name]) > 1}
    # Sorted, because all ranks must sum in the same order.
    for name in sorted(summed & trainable.keys()):
        shared.setdefault(name, []).append(layout.tp)
    buckets = GradientBuckets(
        trainable,
        layout.dp,
        settings.optimizer.ddp_bucket_cap_mb,
        shared,
        communication_dtype=torch_dtype(settings.optimizer.communication_precision),
        exposes_grad=settings.precision is Precision.FP32,
        coalesced_group=layout.tp,
        fuses_products=settings.optimizer.fused_weight_gradients,
    )
    if layout.tp.size > 1:
        share_replicated_gradients(buckets, sharded, layout)
    return buckets


def _norm(
    trainable: Mapping[str, nn.Parameter],
    ranks_of_parameter: Mapping[str, tuple[int, ...]],
    sharded: Mapping[str, ParameterSharding],
    layout: Layout,
) -> GlobalGradNorm:
    """The norm of the complete model's gradient, in which every parameter counts once."""
    counted = {
        n: None for n in trainable if ranks_of_parameter[n][0] == layout.here.pp and counts_here(n, sharded, layout.tp)
    }
    return GlobalGradNorm(
        control=layout.control,
        ranks=layout.pipelines[0],
        counted=tuple(counted),
        copied=tuple(
            name
            for name in trainable
            if name not in counted or (name in sharded and not sharded[name].counts_all_on(layout.tp.rank))
        ),
        unique={name: partial(sharding.unique_values, rank=layout.tp.rank) for name, sharding in sharded.items()},
    )
