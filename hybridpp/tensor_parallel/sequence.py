"""Blocks between whose divided layers every rank has a shard of the sequences: norms, dropout and residuals on 1/tp.

A block takes and returns what looks like whole activations ``[B, S, H]``. Inside, they are shards ``[B, s, H]``
(Korthikanti et al. 2022, arXiv:2205.05198): joined where a module needs all places, whose row layers then sum and
scatter at once. From one such block to the next they stay shards.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hybridpp.errors import PartitionError
from hybridpp.tensor_parallel.crossings import Crossings
from hybridpp.tensor_parallel.sequence_collectives import join_sequence, shard_sequence
from hybridpp.tensor_parallel.sequence_lazy import lazily_joined, shard_of
from hybridpp.tensor_parallel.shard import Sharding, is_linear

CHECKPOINTING = "_gradient_checkpointing_func"
"""Under which name transformers' modules keep the function by which they checkpoint activations."""

Key = int | str
"""An argument of a call: its position, or its name."""


class Ends(NamedTuple):
    """Where shards go in and out.

    Attributes:
        arguments: of the call.
        results: leaves of what it returns, by number.
    """

    arguments: tuple[Key, ...]
    results: tuple[int, ...]


class SequenceBlock(NamedTuple):
    """How a block runs on shards of sequences; module names are inside the block.

    Attributes:
        hidden: the argument that is cut into shards.
        results: which leaves of what it returns are joined.
        joins: modules before which shards are joined, with the arguments that are.
        rows: row layers of which only the own shard is kept.
        wholes: modules that run on whole sequences, as if the block did, with what of theirs is joined and cut again.
    """

    hidden: Key
    results: tuple[int, ...]
    joins: Mapping[str, tuple[Key, ...]]
    rows: tuple[str, ...]
    wholes: Mapping[str, Ends] = {}


def run_on_shards(model: nn.Module, name: str, block: SequenceBlock, sharding: Sharding) -> None:
    """Let a block of a divided model run on shards of sequences from now on.

    Only the instance attributes ``forward`` of it and of modules in it are set, and hooks of whole linear layers. Where
    transformers checkpoints activations inside of it, what is run again finds itself on shards.

    Args:
        model: as :func:`~hybridpp.tensor_parallel.shard` left it.
        name: of the block; may be empty.
        block: how it runs.
        sharding: what ``shard`` returned.
    """
    module, crossings = model.get_submodule(name), sharding.crossings
    for inner, keys in block.joins.items():
        region = module.get_submodule(inner)
        if region in sharding.layers:
            sharding.layers[region].from_shards = True
        else:
            # functools.partial and no closure, so that the model can still be copied.
            region.forward = functools.partial(_joined, keys, crossings, inner, region.forward)
    for row in block.rows:
        sharding.layers[module.get_submodule(row)].to_shards = True
    for inner, ends in block.wholes.items():
        region = module.get_submodule(inner)
        region.forward = functools.partial(_on_wholes, ends, crossings, inner, region.forward)
    for layer in module.modules():
        if CHECKPOINTING in vars(layer):
            setattr(layer, CHECKPOINTING, functools.partial(_checkpointed, crossings, getattr(layer, CHECKPOINTING)))
        if is_linear(layer) and layer not in sharding.layers:
            # No forward of its own: its weight's gradient is still told apart.
            layer.register_forward_hook(functools.partial(_draw_again, crossings))
    module.forward = functools.partial(_sharded, block, crossings, name, module.forward)


def _checkpointed(
    crossings: Crossings, checkpoint: Callable[..., Any], function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    return checkpoint(crossings.repeatable(function), *args, **kwargs)


def _joined(
    keys: tuple[Key, ...], crossings: Crossings, name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    for key in keys:
        args, kwargs = _replaced(args, kwargs, key, crossings.join(_argument(args, kwargs, key, name)))
    return forward(*args, **kwargs)


def _on_wholes(
    ends: Ends, crossings: Crossings, name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    for key in ends.arguments:
        args, kwargs = _replaced(args, kwargs, key, crossings.join(_argument(args, kwargs, key, name)))
    with crossings.on_wholes():
        output = forward(*args, **kwargs)

    def shard(whole: Tensor) -> Tensor:
        own = shard_sequence(crossings.with_places(whole, is_shard=False), crossings.group)
        return own.flatten(0, 1) if whole.dim() == 2 else own

    own = _with_results(output, ends.results, shard)
    for leaf in pytree.tree_leaves(own)[:1]:
        crossings.again(leaf)
    return own


def _with_results(output: Any, numbers: tuple[int, ...], change: Callable[[Tensor], Tensor]) -> Any:
    leaves, tree = pytree.tree_flatten(output)
    for number in numbers:
        if number < len(leaves) and isinstance(leaves[number], Tensor):
            leaves[number] = change(leaves[number])
    return pytree.tree_unflatten(leaves, tree)


def _draw_again(crossings: Crossings, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
    crossings.again(output)


def _sharded(
    block: SequenceBlock, crossings: Crossings, name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    whole = _argument(args, kwargs, block.hidden, name)
    length, group = whole.shape[1], crossings.group
    shard = shard_of(whole, group)
    args, kwargs = _replaced(args, kwargs, block.hidden, shard)
    with crossings.on_shards(shard, length):
        output = forward(*args, **kwargs)
    # As for logits: without gradients a script may look at what a model returned on one rank alone.
    join = lazily_joined if crossings.keeps_parts or torch.is_grad_enabled() else join_sequence
    return _with_results(output, block.results, lambda own: join(own, length, group))


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], key: Key, name: str) -> Tensor:
    found = dict(enumerate(args)).get(key) if isinstance(key, int) else kwargs.get(key)
    if not isinstance(found, Tensor):
        raise PartitionError(
            f"sequence parallelism looks for the activations of {name!r} where they were on the sample, in argument "
            f"{key!r}: the call has {len(args)} positional arguments and {sorted(kwargs)}. Call the model as on the "
            "sample, or leave enable_sequence_parallelism out."
        )
    return found


def _replaced(
    args: tuple[Any, ...], kwargs: dict[str, Any], key: Key, value: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(key, int):
        return (*args[:key], value, *args[key + 1 :]), kwargs
    return args, {**kwargs, key: value}
