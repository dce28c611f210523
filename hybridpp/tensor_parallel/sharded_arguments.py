"""Modules that compute with shards of some arguments and results (a bias per head); callers see the full tensors."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from hybridpp.cluster import Group
from hybridpp.module_adapter import AdapterLayer, ModuleAdapter
from hybridpp.nn.torch_private import pytree
from hybridpp.sharded_activations.collectives import copy_to_ranks, sum_over_ranks
from hybridpp.sharding_plan.sharding_spec import DimShard
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
        arguments: by the argument's index among all leaves of the call; their gradients are all-reduced.
        results: by the result's index among all leaves.
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
    for index, part in arguments.items():
        if index < len(leaves) and isinstance(leaves[index], Tensor):
            leaves[index] = part.select(copy_to_ranks(leaves[index], group), group.rank, group.size)
    args, kwargs = pytree.tree_unflatten(leaves, tree)
    output = forward(*args, **kwargs)
    if not results:
        return output
    leaves, tree = pytree.tree_flatten(output)
    for index, part in results.items():
        if index < len(leaves) and isinstance(leaves[index], Tensor):
            leaves[index] = _gather_result(leaves[index], part, group)
    return pytree.tree_unflatten(leaves, tree)


def _gather_result(local: Tensor, part: DimShard, group: Group) -> Tensor:
    """The full tensor from all ranks' shards; each rank gets the gradient of its shard."""
    size = local.shape[part.dim] * group.size
    positions = part.index(group.rank, group.size, size).to(local.device)
    zeros = local.new_zeros((*local.shape[: part.dim], size, *local.shape[part.dim + 1 :]))
    return sum_over_ranks(zeros.index_add(part.dim, positions, local), group)
