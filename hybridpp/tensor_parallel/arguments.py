"""Modules that are whole from outside, but of whose arguments and results each rank has its part (a bias per head)."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hybridpp.cluster import Group
from hybridpp.tensor_parallel.collectives import copy_to_ranks, sum_over_ranks
from hybridpp.tensor_parallel.crossings import Crossings
from hybridpp.tensor_parallel.division import Part


def use_parts(
    module: nn.Module, arguments: Mapping[int, Part], results: Mapping[int, Part], crossings: Crossings
) -> None:
    """Let the module's forward be given this rank's parts, and let what it makes of them leave whole.

    Only the instance attribute ``forward`` is set.

    Args:
        module: whose forward runs on parts.
        arguments: by the number of the argument among all leaves of the call; their gradients are summed.
        results: by the number of the result among all leaves.
        crossings: of the model.
    """
    # functools.partial and no closure, so that the model can still be copied.
    module.forward = functools.partial(_run, arguments, results, crossings, module.forward)


def _run(
    arguments: Mapping[int, Part],
    results: Mapping[int, Part],
    crossings: Crossings,
    forward: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    group = crossings.group
    leaves, tree = pytree.tree_flatten((args, kwargs))
    for number, part in arguments.items():
        if number < len(leaves) and isinstance(leaves[number], Tensor):
            leaves[number] = part.of(copy_to_ranks(leaves[number], group), group.rank, group.size)
    args, kwargs = pytree.tree_unflatten(leaves, tree)
    output = forward(*args, **kwargs)
    if not results:
        return output
    leaves, tree = pytree.tree_flatten(output)
    for number, part in results.items():
        if number < len(leaves) and isinstance(leaves[number], Tensor):
            leaves[number] = _whole(leaves[number], part, group)
    return pytree.tree_unflatten(leaves, tree)


def _whole(own: Tensor, part: Part, group: Group) -> Tensor:
    """All ranks' parts in their places; the gradient of each goes to its rank."""
    size = own.shape[part.dim] * group.size
    places = part.index(group.rank, group.size, size).to(own.device)
    empty = own.new_zeros((*own.shape[: part.dim], size, *own.shape[part.dim + 1 :]))
    return sum_over_ranks(empty.index_add(part.dim, places, own), group)
