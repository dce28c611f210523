"""Try the shards of single linear layers whose own forwards may refuse them; torch's linear layers take any size."""

from collections.abc import Hashable

import torch
from torch import nn

from hybridpp.cluster import Loopback, current_world
from hybridpp.module_adapter import ModuleAdapter
from hybridpp.nn import walk
from hybridpp.nn.linear import is_conv1d_forward, linear_shape
from hybridpp.plan_search.block_run import random_weights
from hybridpp.plan_search.run_formats import BlockFormats, RunFormats
from hybridpp.plan_search.trial_errors import failure_reason, is_machine_failure
from hybridpp.sharding_plan.sharding_spec import ShardingSpec
from hybridpp.tensor_parallel.shard import shard

# Positions of the trial's input: kernels want a few rows.
_POSITIONS = (2, 16)


def refused_layers(model: nn.Module, spec: ShardingSpec, tp_size: int, formats: RunFormats) -> dict[str, str]:
    """The linear layers that run whole in the formats of the run, and not as the spec divides them; with the errors.

    Layers of blocks whose plan was searched have been tried with their blocks: leave them out of ``spec``.

    Args:
        model: with full parameters; it is not changed.
        spec: how it will be sharded.
        tp_size: number of ranks.
        formats: of the run.
    """
    layers = own_forwards(model, spec)
    formats_of = formats.by_block(model) if layers else None
    known: dict[Hashable, str | None] = {}
    refused: dict[str, str] = {}
    for name, layer in layers.items():
        assert formats_of is not None, "there are layers"
        in_run, inner = formats_of(name), spec.of_block(name)
        shapes = tuple(held.shape for held in walk.parameters(layer))
        kind = type(layer), shapes, in_run, str(inner)
        if kind not in known:
            known[kind] = _refusal(layer, inner, tp_size, in_run)
        reason = known[kind]
        if reason is not None:
            refused[name] = f"its shard raises {reason} (in {in_run})"
    return refused


def own_forwards(model: nn.Module, spec: ShardingSpec) -> dict[str, nn.Module]:
    """The linear layers that a spec divides and that are not computed by the forwards of torch or transformers."""
    held = {name: walk.submodule(model, name) for name in spec.holders()}
    return {name: layer for name, layer in held.items() if linear_shape(layer) is not None and not _is_plain(layer)}


def _is_plain(layer: nn.Module) -> bool:
    forward = type(layer).forward
    return "forward" not in vars(layer) and (forward is nn.Linear.forward or is_conv1d_forward(forward))


def _refusal(layer: nn.Module, spec: ShardingSpec, tp_size: int, formats: BlockFormats) -> str | None:
    def run(size: int) -> None:
        adapter = ModuleAdapter(random_weights(layer, torch.float32))
        if size > 1:
            group = current_world().split([range(size)])
            assert group is not None
            shard(adapter, spec, group)
        formats.put_on(adapter)
        shape = linear_shape(adapter.model)
        assert shape is not None, "it is a linear layer"
        x = formats.of_argument(torch.ones(*_POSITIONS, shape.num_inputs, requires_grad=True), torch.float32)
        adapter.model(x).float().sum().backward()

    try:
        Loopback(tp_size).run(lambda: run(tp_size))
    except Exception as error:  # a kernel may raise anything
        reason = failure_reason(error)
        try:
            run(1)
        except Exception as alone:  # it takes something else than this trial gives it
            if is_machine_failure(alone):
                raise
            return None
        return reason
    return None
