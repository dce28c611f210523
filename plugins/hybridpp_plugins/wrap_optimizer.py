"""Wrap the user's optimizer for this rank's parameters, and create their gradient buckets."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hybridpp.config import Precision
from hybridpp.data_parallel import GradientBuckets
from hybridpp.module_adapter import ModuleAdapter
from hybridpp.nn import walk
from hybridpp.optim import GlobalGradNorm, attributes_of, fuse_by_default
from hybridpp.precision import PartOf, torch_dtype
from hybridpp.tensor_parallel import ParameterSharding
from hybridpp_plugins.apply_tp import counts_here, local_state, placements, share_replicated_gradients
from hybridpp_plugins.layout import Layout
from hybridpp_plugins.optimizer import GroupBefore, HybridOptimizer
from hybridpp_plugins.optimizer_state import OptimizerStateOwner
from hybridpp_plugins.settings import PluginSettings
from hybridpp_plugins.trained_weights import TrainedWeights


def wrap_optimizer(
    optimizer: Optimizer,
    names: dict[int, str],
    adapter: ModuleAdapter,
    weights: TrainedWeights,
    summed: AbstractSet[str],
    settings: PluginSettings,
    layout: Layout,
) -> tuple[GradientBuckets, HybridOptimizer]:
    """Boost an optimizer, in place. Collective: all ranks.

    Args:
        optimizer: the user's.
        names: of the complete model's parameters, by ``id``.
        adapter: of this rank's part of the model.
        weights: that this rank trains.
        summed: parameters whose gradients are summed over the tensor-parallel ranks.
        settings: the plugin's.
        layout: the ranks.
    """
    model, target = adapter.model, weights.target(adapter.model)
    updated = {name: parameter for name, parameter in walk.named_parameters(model) if name not in weights.parameters}
    updated |= target.tensors
    for name, tensor in target.tensors.items():
        _share_attributes(weights.parameters[name], tensor, None if weights.flat is None else weights.flat.parts[name])
    before = [GroupBefore.of(group, names) for group in optimizer.param_groups]
    _repoint(optimizer, names, updated, weights, layout.tp.rank)
    unfuse = fuse_by_default(optimizer, _fuses_on(settings, weights))
    sharded = placements(model)
    buckets = _buckets(weights, summed, sharded, settings, layout)
    buckets.hide_on(target.tensors)
    for name, parameter in weights.parameters.items():
        adapter.noted(parameter, "hook on its gradient", partial(buckets.release, name))
    norm = _norm(weights, sharded, layout)
    owner = OptimizerStateOwner(
        optimizer, updated, weights.masters, sharded, layout.tp, settings.precision, weights.segment
    )
    boosted = HybridOptimizer(
        optimizer, buckets, target, weights.masters, norm, settings.optimizer, settings.precision, owner
    )
    if boosted.accumulated.clip_detector is not None and layout.tp.size > 1:
        shards = {name for name in weights.parameters if name in sharded and not sharded[name].has_copies()}
        boosted.accumulated.clip_detector.sharded = shards
        boosted.accumulated.clip_detector.peers = layout.grid.groups("tp")
    boosted.gradient_checks = buckets.checks(
        model, {name: sharded[name].dim for name in weights.parameters if name in sharded}
    )
    boosted.on_release, boosted.groups_before = unfuse, before
    return buckets, boosted


def _fuses_on(settings: PluginSettings, weights: TrainedWeights) -> tuple[str, ...]:
    """The kinds of devices on which an optimizer that leaves the choice to torch is fused."""
    kinds = settings.optimizer.fuses_on
    # A group may have masters on both.
    is_mixed = weights.masters.transfer is not None and any(p.is_cuda for p in weights.parameters.values())
    return (*kinds, "cpu") if is_mixed and "cuda" in kinds else kinds


def _repoint(
    optimizer: Optimizer,
    names: dict[int, str],
    updated: Mapping[str, nn.Parameter],
    weights: TrainedWeights,
    tp_rank: int,
) -> None:
    """Replace the optimizer's parameters by what this rank updates; groups and their settings stay, even if empty."""
    parts = {} if weights.flat is None else weights.flat.parts
    for group in optimizer.param_groups:
        kept = [index for index, parameter in enumerate(group["params"]) if names[id(parameter)] in updated]
        after = [updated[names[id(group["params"][index])]] for index in kept]
        for parameter in group["params"]:
            name, state = names[id(parameter)], optimizer.state.pop(parameter, None)
            if state is not None and name in updated:
                local = local_state(parameter, state, tp_rank)
                optimizer.state[updated[name]] = {
                    key: _taken(value, parts.get(name), updated[name]) if _is_like(value, parameter) else value
                    for key, value in local.items()
                }
        group["params"] = after
        if "param_names" in group:
            group["param_names"] = [group["param_names"][index] for index in kept]


def _share_attributes(parameter: Tensor, updated: Tensor, part: PartOf | None) -> None:
    """Let what is updated for a parameter have the attributes that the script has set on it, now or later.

    Of tensors of the parameter's shape it gets its part. Then it has those attributes only that are there now.
    """
    attributes = attributes_of(parameter)
    if updated is parameter or attributes is not vars(parameter):
        return
    if any(_is_like(value, parameter) for value in attributes.values()):
        vars(updated).update(
            (key, _taken(value, part, updated) if _is_like(value, parameter) else value)
            for key, value in attributes.items()
        )
    else:
        updated.__dict__ = attributes


def _taken(value: Tensor, part: PartOf | None, updated: Tensor) -> Tensor:
    """The part of a state that belongs to what is updated, beside it if that was moved to host memory."""
    taken = value if part is None else part(value)
    return taken.to(updated.device) if updated.device.type == "cpu" else taken


def _is_like(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def restore_optimizer(
    boosted: HybridOptimizer, parameters: Mapping[str, nn.Parameter], state: Mapping[str, Mapping[str, Any]]
) -> None:
    """Let an optimizer that was boosted work on the parameters of the unsharded model again, with its state.

    Args:
        boosted: the wrapper of the user's optimizer.
        parameters: of the model, by name.
        state: by the parameter's name.
    """
    optimizer, updated = boosted.unwrap(), boosted.target.tensors
    for tensor in updated.values():
        optimizer.state.pop(tensor, None)
    for group, before in zip(optimizer.param_groups, boosted.groups_before, strict=True):
        group["params"] = [parameters[name] for name in before.names]
        if "param_names" in group:
            group["param_names"] = list(before.param_names)
        for name in (name for name in before.names if name in state):
            parameter = parameters[name]
            optimizer.state[parameter] = {
                key: value.to(parameter.device) if _is_like(value, parameter) else value
                for key, value in state[name].items()
            }


def _buckets(
    weights: TrainedWeights,
    summed: AbstractSet[str],
    sharded: Mapping[str, ParameterSharding],
    settings: PluginSettings,
    layout: Layout,
) -> GradientBuckets:
    trainable, ranks_of_parameter = weights.parameters, weights.ranks_of
    assert weights.layout is not None, "there is an optimizer"
    groups = layout.groups_within_pipelines(sorted({ranks for ranks in ranks_of_parameter.values() if len(ranks) > 1}))
    shared = {name: [groups[ranks_of_parameter[name]]] for name in trainable if len(ranks_of_parameter[name]) > 1}
    # Sorted, because all ranks must sum in the same order.
    for name in sorted(summed & trainable.keys()):
        shared.setdefault(name, []).append(layout.tp)
    buckets = GradientBuckets(
        trainable,
        weights.replicas,
        weights.layout,
        shared,
        communication_dtype=torch_dtype(settings.optimizer.communication_precision),
        exposes_grad=settings.precision is Precision.FP32,
        coalesced_group=layout.tp,
        fuses_products=settings.optimizer.fused_weight_gradients,
        sharding=weights.sharding,
    )
    if layout.tp.size > 1:
        share_replicated_gradients(buckets, sharded, layout)
    return buckets


def _norm(weights: TrainedWeights, sharded: Mapping[str, ParameterSharding], layout: Layout) -> GlobalGradNorm:
    """The norm of the complete model's gradient, in which every element counts once."""
    ranks_of, tp = weights.ranks_of, layout.tp
    here = weights.parameters if weights.flat is None else weights.flat.pieces
    counted = {n: None for n in here if ranks_of[n][0] == layout.here.pp and counts_here(n, sharded, tp)}
    in_part = {name for name in here if name in sharded and not sharded[name].counts_all_on(tp.rank)}
    masks = {name: sharded[name].unique_mask(weights.parameters[name].detach(), tp.rank) for name in in_part}
    return GlobalGradNorm(
        control=layout.control,
        ranks=tuple(rank for ranks in layout.pipelines[: weights.segment.out_of] for rank in ranks),
        num_replicas=layout.dp.size,
        counted=tuple(counted),
        copied=tuple(name for name in here if name not in counted or name in in_part),
        unique={name: weights.part(name, mask) for name, mask in masks.items() if name in counted},
        is_staged=layout.pp.size > 1,
    )
