"""Refuse optimizers whose updates depend on more than a rank holds, so that the layout never changes the result."""

from collections.abc import Collection, Sequence

import torch
from torch.optim import Optimizer

from hybridpp.cluster import get_dist_logger
from hybridpp.errors import ConfigError
from hybridpp.nn.structure import Structure
from hybridpp.optim import FLAT, Locality, LocalityUnknown, find_localities, optimizer_name
from hybridpp.tensor_parallel import sharding_of
from hybridpp_plugins.layout import Layout

# Attributes of an optimizer that its copies in a trial lack, or have of their own.
_NOT_TRIED = ("param_groups", "state", "step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_LOCAL = "an elementwise optimizer (AdamW, HybridAdam, SGD)"


def check_locality(optimizer: Optimizer, names: dict[int, str], layout: Layout, device: torch.device) -> None:
    """Refuse an optimizer whose updates would depend on the layout. Call it after sharding, before the model is cut.

    Args:
        optimizer: the user's.
        names: of the model's parameters, by ``id``.
        layout: the ranks.
        device: where this one computes.

    Raises:
        ConfigError: its updates depend on unsharded parameters of which ranks hold shards, or on all parameters.
    """
    groups = optimizer.param_groups
    shardings = [[(parameter, sharding_of(parameter)) for parameter in group["params"]] for group in groups]
    sharded = [[names[id(parameter)] for parameter, sharding in group if sharding] for group in shardings]
    if layout.grid.pp_size == 1 and not any(sharded):
        return
    name, sizes = optimizer_name(optimizer), f"tp_size={layout.grid.tp_size}, pp_size={layout.grid.pp_size}"
    try:
        cuts = [{(parameter.dim(), sharding.dim) for parameter, sharding in group if sharding} for group in shardings]
        found = _localities(optimizer, cuts, layout, device)
    except LocalityUnknown as reason:
        get_dist_logger().warning(
            f"could not check whether {name} gives the same updates for every tp_size and pp_size ({reason}). "
            "Compare the losses of some steps with those of tp_size=1, pp_size=1.",
            ranks=[0],
        )
        return
    if Locality.EVERYTHING in found:
        raise ConfigError(
            f"{name}'s update of a parameter depends on other parameters, of which a rank holds only a part: got "
            f"{sizes}"
            f". Use tp_size=1, pp_size=1, or {_LOCAL}."
        )
    kinds = zip(sharded, found, strict=True)
    refused = [one for group, kind in kinds if kind is Locality.PARAMETERS for one in group]
    if refused:
        more = f" and of {len(refused) - 1} more" if len(refused) > 1 else ""
        raise ConfigError(
            f"{name}'s update of an element depends on the unsharded parameter, and a rank holds only a shard of "
            f"{refused[0]!r}{more}: got {sizes}. Use tp_size=1, with a larger pp_size if needed, or {_LOCAL}."
        )


def indivisible_parameters(
    optimizer: Optimizer, names: dict[int, str], zero_stage: int, layout: Layout, device: torch.device
) -> frozenset[str]:
    """The parameters, by name, that replicas cannot divide among themselves, because the optimizer reads them whole.

    Args:
        optimizer: the user's.
        names: of the model's parameters, by ``id``.
        zero_stage: of the plugin.
        layout: the ranks.
        device: where this rank computes.

    Raises:
        ConfigError: the optimizer's update of a parameter depends on other parameters.
    """
    groups, name = optimizer.param_groups, optimizer_name(optimizer)
    cuts = [{(parameter.dim(), FLAT) for parameter in group["params"] if parameter.dim()} for group in groups]
    try:
        found = _localities(optimizer, cuts, layout, device)
    except LocalityUnknown as reason:
        get_dist_logger().warning(
            f"could not check what an update of {name} depends on ({reason}), so with zero_stage={zero_stage} every "
            "parameter is updated whole, by one replica. Compare the losses of some steps with those of zero_stage=0.",
            ranks=[0],
        )
        found = [Locality.PARAMETERS] * len(groups)
    if Locality.EVERYTHING in found:
        raise ConfigError(
            f"{name}'s update of a parameter depends on other parameters, of which a replica updates only a part: got "
            f"zero_stage={zero_stage}. Use zero_stage=0, or {_LOCAL}."
        )
    kinds = zip(groups, found, strict=True)
    return frozenset(
        names[id(parameter)] for group, kind in kinds if kind is not Locality.ELEMENTS for parameter in group["params"]
    )


def _localities(
    optimizer: Optimizer, cuts: Sequence[Collection[tuple[int, int]]], layout: Layout, device: torch.device
) -> list[Locality]:
    """As :func:`find_localities`; of in-process ranks with equal optimizers, one tries for all."""
    results = layout.world.common_results("localities")
    # An optimizer with state is tried with a part of it; of this library's objects a description has the class only.
    if results is None or optimizer.state or type(optimizer).__module__.partition(".")[0] == "hybridpp":
        return find_localities(optimizer, cuts, device)
    structure = Structure()
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    own = {name: value for name, value in vars(optimizer).items() if name not in _NOT_TRIED}
    kinds = tuple(
        tuple((parameter.dim(), parameter.dtype, parameter.requires_grad) for parameter in group["params"])
        for group in optimizer.param_groups
    )
    key = structure.of([type(optimizer), settings, own]), kinds, tuple(map(frozenset, cuts)), device
    return results.get(
        key,
        lambda: find_localities(optimizer, cuts, device),
        lambda found: True,
        is_of_run=not structure.is_lasting,
    )
