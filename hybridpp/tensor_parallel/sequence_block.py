"""Blocks that run on sequence shards between their sharded layers: norms, dropout and residuals on 1/tp.

A block takes and returns activations of the full shape ``[B, S, H]``. Inside, they are shards ``[B, s, H]``
(Korthikanti et al. 2022, arXiv:2205.05198): gathered where a module needs all positions, whose row layers then
reduce-scatter. From one such block to the next they stay shards.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridpp.errors import PartitionError
from hybridpp.module_adapter import AdapterLayer
from hybridpp.nn.linear import is_linear
from hybridpp.nn.names import qualified
from hybridpp.nn.torch_private import pytree
from hybridpp.sharded_activations.deferred_sequence_gather import deferred_sequence_gather, local_sequence_shard
from hybridpp.sharded_activations.sequence_collectives import gather_sequence, shard_sequence
from hybridpp.tensor_parallel.shard import ShardedModel
from hybridpp.tensor_parallel.tp_context import TensorParallelContext

CHECKPOINTING = "_gradient_checkpointing_func"
"""The attribute in which transformers' modules hold the function that checkpoints activations."""

Key = int | str
"""An argument of a call: its index, or its name."""


class RegionIO(NamedTuple):
    """The inputs and outputs of a module that are sequence shards around it.

    Attributes:
        arguments: of the call.
        results: leaves of what it returns, by index.
    """

    arguments: tuple[Key, ...]
    results: tuple[int, ...]


class SequenceBlock(NamedTuple):
    """How a block runs on sequence shards; module names are inside the block.

    Attributes:
        hidden: the argument that is sharded.
        results: the leaves of the block's results that are gathered.
        gather_inputs: modules before which shards are gathered, with the arguments that are.
        rows: row layers whose outputs are reduce-scattered.
        replicated: modules that run on full sequences, with the arguments and results that are gathered and sharded
            again.
    """

    hidden: Key
    results: tuple[int, ...]
    gather_inputs: Mapping[str, tuple[Key, ...]]
    rows: tuple[str, ...]
    replicated: Mapping[str, RegionIO] = {}


def run_sequence_parallel(name: str, block: SequenceBlock, sharding: ShardedModel) -> frozenset[str]:
    """Let a block of a sharded model run on sequence shards.

    Where transformers checkpoints activations inside the block, the recomputation runs on shards, too. A module that
    several blocks share is prepared once: they must use it in the same way.

    Args:
        name: of the block; may be empty.
        block: how it runs.
        sharding: the result of ``shard``.

    Returns:
        Names in the model of the modules inside that must run within the block's forward: they gather, scatter or set
        the RNG stream, for which they need the length of the sequence.
    """
    adapter, context = sharding.adapter, sharding.context
    module = adapter.model.get_submodule(name)
    for inner, keys in block.gather_inputs.items():
        reader = module.get_submodule(inner)
        if reader in sharding.layers:
            sharding.layers[reader].gathers_input = True
        elif reader not in sharding.on_sequence_shards:
            adapter.wrap(reader, AdapterLayer.SEQUENCE_GATHER, _run_on_gathered, keys, context, inner)
    for row in block.rows:
        sharding.layers[module.get_submodule(row)].scatters_output = True
    for inner, region in block.replicated.items():
        replicated = module.get_submodule(inner)
        if replicated not in sharding.on_sequence_shards:
            adapter.wrap(replicated, AdapterLayer.SEQUENCE_REPLICATED, _run_replicated, region, context, inner)
    inside = {*block.gather_inputs, *block.rows, *block.replicated}
    for inner, layer in module.named_modules():
        is_new = layer not in sharding.on_sequence_shards
        if CHECKPOINTING in vars(layer) and is_new:
            checkpoint = functools.partial(_checkpointed, context, getattr(layer, CHECKPOINTING))
            adapter.set_attribute(layer, CHECKPOINTING, checkpoint, "checkpoints of sharded sequences")
        if layer in sharding.layers:
            inside.add(inner)
        elif is_linear(layer):
            if is_new:
                # It is not wrapped, so that its weight's gradient can still be deferred.
                handle = layer.register_forward_hook(functools.partial(_refork_rng, context))
                adapter.hooked(layer, "hook on the RNG stream of sharded sequences", handle)
            inside.add(inner)
    sharding.on_sequence_shards.update(module.modules())
    adapter.wrap(module, AdapterLayer.SEQUENCE_SHARD, _run_on_shard, block, context, name)
    return frozenset(qualified(name, inner) for inner in inside)


def _checkpointed(
    context: TensorParallelContext,
    checkpoint: Callable[..., Any],
    function: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    return checkpoint(context.for_recompute(function), *args, **kwargs)


def _gather_arguments(
    keys: tuple[Key, ...],
    context: TensorParallelContext,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call of module ``name``, with sequence shards gathered."""
    for key in keys:
        full = context.gather_from_sp_region(_argument(args, kwargs, key, name))
        args, kwargs = _with_argument(args, kwargs, key, full)
    return args, kwargs


def _run_on_gathered(
    keys: tuple[Key, ...],
    context: TensorParallelContext,
    name: str,
    forward: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    args, kwargs = _gather_arguments(keys, context, name, args, kwargs)
    return forward(*args, **kwargs)


def _run_replicated(
    region: RegionIO,
    context: TensorParallelContext,
    name: str,
    forward: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    args, kwargs = _gather_arguments(region.arguments, context, name, args, kwargs)
    with context.replicated_region():
        output = forward(*args, **kwargs)

    def shard(full: Tensor) -> Tensor:
        local = shard_sequence(context.unflatten_sequence(full, is_shard=False), context.group)
        return local.flatten(0, 1) if full.dim() == 2 else local

    sharded = _with_results(output, region.results, shard)
    for leaf in pytree.tree_leaves(sharded)[:1]:
        context.refork_rng(leaf)
    return sharded


def _with_results(output: Any, indices: tuple[int, ...], change: Callable[[Tensor], Tensor]) -> Any:
    leaves, tree = pytree.tree_flatten(output)
    for index in indices:
        if index < len(leaves) and isinstance(leaves[index], Tensor):
            leaves[index] = change(leaves[index])
    return pytree.tree_unflatten(leaves, tree)


def _refork_rng(context: TensorParallelContext, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
    context.refork_rng(output)


def _run_on_shard(
    block: SequenceBlock,
    context: TensorParallelContext,
    name: str,
    forward: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    full = _argument(args, kwargs, block.hidden, name)
    length, group = full.shape[1], context.group
    shard = local_sequence_shard(full, group)
    args, kwargs = _with_argument(args, kwargs, block.hidden, shard)
    with context.sequence_parallel_region(shard, length):
        output = forward(*args, **kwargs)
    # As for logits: without gradients a script may read a model's results on one rank alone.
    gather = deferred_sequence_gather if context.keeps_logits_sharded or torch.is_grad_enabled() else gather_sequence
    return _with_results(output, block.results, lambda local: gather(local, length, group))


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], key: Key, name: str) -> Tensor:
    argument = dict(enumerate(args)).get(key) if isinstance(key, int) else kwargs.get(key)
    if not isinstance(argument, Tensor):
        raise PartitionError(
            f"sequence parallelism expects the activations of {name!r} in argument {key!r}, as on the sample: the call "
            f"has {len(args)} positional arguments and {sorted(kwargs)}. Call the model as on the sample, or leave "
            "enable_sequence_parallelism out."
        )
    return argument


def _with_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], key: Key, value: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(key, int):
        return (*args[:key], value, *args[key + 1 :]), kwargs
    return args, {**kwargs, key: value}
