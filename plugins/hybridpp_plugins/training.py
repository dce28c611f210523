"""What trains: the optimizer on what is this rank's, and the gradients that add up for it."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from torch import nn
from torch.optim import Optimizer

from hybridpp.config import Precision
from hybridpp.data_parallel import GradientBuckets
from hybridpp.precision import MasterWeights, dtype_of
from hybridpp.tensor_parallel import Placement
from hybridpp_plugins.agreed_norm import AgreedNorm
from hybridpp_plugins.layout import Layout
from hybridpp_plugins.optimizer import HybridOptimizer
from hybridpp_plugins.settings import Settings
from hybridpp_plugins.sharding import counts_here, own_state, placements, share_copies


def train(
    optimizer: Optimizer,
    names: dict[int, str],
    model: nn.Module,
    holders: Mapping[str, tuple[int, ...]],
    summed: AbstractSet[str],
    masters: MasterWeights,
    settings: Settings,
    layout: Layout,
) -> tuple[GradientBuckets, HybridOptimizer]:
    """Boost an optimizer, in place. Collective: all ranks.

    Args:
        optimizer: the user's.
        names: of the whole model's parameters, by ``id``.
        model: what this rank has of it.
        holders: the ranks of a pipeline that hold each of the whole model's parameters.
        summed: parameters whose gradients are sums over all ranks that share layers.
        masters: of the model's weights.
        settings: the plugin's.
        layout: the ranks.
    """
    owned = dict(model.named_parameters())
    _repoint(optimizer, names, owned, masters, layout.tp.rank)
    trainable = {name: parameter for name, parameter in owned.items() if parameter.requires_grad}
    lies = placements(model)
    buckets = _buckets(trainable, summed, holders, lies, settings, layout)
    norm = _norm(trainable, holders, lies, layout)
    return buckets, HybridOptimizer(
        optimizer, buckets, masters, trainable, norm, settings.optimizer, settings.precision
    )


def _repoint(
    optimizer: Optimizer,
    names: dict[int, str],
    owned: dict[str, nn.Parameter],
    masters: MasterWeights,
    tp_rank: int,
) -> None:
    """Let the optimizer work on what this rank owns; groups and their settings stay, also those left empty."""
    for group in optimizer.param_groups:
        kept = [place for place, parameter in enumerate(group["params"]) if names[id(parameter)] in owned]
        before = [group["params"][place] for place in kept]
        after = [masters.masters.get(names[id(parameter)], parameter) for parameter in before]
        for parameter in group["params"]:
            state = optimizer.state.pop(parameter, None)
            if state is not None and names[id(parameter)] in owned:
                target = masters.masters.get(names[id(parameter)], parameter)
                optimizer.state[target] = own_state(parameter, state, tp_rank)
        group["params"] = after
        if "param_names" in group:
            group["param_names"] = [group["param_names"][place] for place in kept]


def _buckets(
    trainable: Mapping[str, nn.Parameter],
    summed: AbstractSet[str],
    holders: Mapping[str, tuple[int, ...]],
    lies: Mapping[str, Placement],
    settings: Settings,
    layout: Layout,
) -> GradientBuckets:
    groups = layout.groups_within_pipelines(sorted({ranks for ranks in holders.values() if len(ranks) > 1}))
    shared = {name: [groups[holders[name]]] for name in trainable if len(holders[name]) > 1}
    # Sorted: all ranks must sum in one order.
    for name in sorted(summed & trainable.keys()):
        shared.setdefault(name, []).append(layout.tp)
    buckets = GradientBuckets(
        trainable,
        layout.dp,
        settings.optimizer.ddp_bucket_cap_mb,
        shared,
        communication_dtype=dtype_of(settings.optimizer.communication_precision),
        visible=settings.precision is Precision.FP32,
        alike=layout.tp,
    )
    if layout.tp.size > 1:
        share_copies(buckets, lies, layout)
    return buckets


def _norm(
    trainable: Mapping[str, nn.Parameter],
    holders: Mapping[str, tuple[int, ...]],
    lies: Mapping[str, Placement],
    layout: Layout,
) -> AgreedNorm:
    """Of the whole model's gradient, in which every parameter counts once."""
    counted_at = [ranks[0] for ranks in holders.values()]
    counted = {n: None for n in trainable if holders[n][0] == layout.here.pp and counts_here(n, lies, layout.tp)}
    return AgreedNorm(
        control=layout.control,
        ranks=layout.pipelines[0],
        counted=tuple(counted),
        copied=tuple(
            name
            for name in trainable
            if name not in counted or (name in lies and not lies[name].counts_all_on(layout.tp.rank))
        ),
        width=max(counted_at.count(rank) for rank in range(layout.grid.pp_size)) if counted_at else 0,
        places=lies,
        tp_rank=layout.tp.rank,
    )
