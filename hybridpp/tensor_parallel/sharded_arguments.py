"""Modules that compute with shards of some arguments and results, which are full outside (a bias per head)."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from hybridpp.cluster import Group
from hybridpp.module_adapter import AdapterLayer, ModuleAdapter
from hybridpp.nn.torch_private import pytree
from hybridpp.tensor_parallel.collectives import copy_to_ranks, sum_over_ranks
from hybridpp.tensor_parallel.sharding_spec import DimShard
from hybridpp.tensor_parallel.tp_context import TensorParallelContext


def shard_arguments(
    adapter: ModuleAdapter,
    module: nn.Module,
    arguments: Mapping[int, DimShard],
    results: Mapping[int, DimShard],
    context: TensorParallelContext,
) -> None:
    """Let a module get this rank's shards of arguments, and gather its results.

    Args:
        adapter: of the model.
        module: whose forward computes with shards.
        arguments: by the argument's number among all leaves of the call; their gradients are all-reduced.
        results: by the result's number among all leaves.
        context: of the model.
    """
    adapter.wrap(module, AdapterLayer.SHARDED_ARGUMENTS, _run, arguments, results, context)


def _run(
    arguments: Mapping[int, DimShard],
    results: Mapping[int, DimShard],
    context: TensorParallelContext,
    forward: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    group = context.group
    leaves, tree = pytree.tree_flatten((args, kwargs))
    for number, part in arguments.items():
        if number < len(leaves) and isinstance(leaves[number], Tensor):
            leaves[number] = part.select(copy_to_ranks(leaves[number], group), group.rank, group.size)
    args, kwargs = pytree.tree_unflatten(leaves, tree)
    output = forward(*args, **kwargs)
    if not results:
        return output
    leaves, tree = pytree.tree_flatten(output)
    for number, part in results.items():
        if number < len(leaves) and isinstance(leaves[number], Tensor):
            leaves[number] = _whole(leaves[number], part, group)
    return pytree.tree_unflatten(leaves, tree)


def _whole(own: Tensor, part: DimShard, group: Group) -> Tensor:
    """The full tensor from all ranks' shards; each rank gets the gradient of its own."""
    size = own.shape[part.dim] * group.size
    places = part.index(group.rank, group.size, size).to(own.device)
    empty = own.new_zeros((*own.shape[: part.dim], size, *own.shape[part.dim + 1 :]))
    return sum_over_ranks(empty.index_add(part.dim, places, own), group)
