"""How the layers of a group may be divided, by their shapes: plain, fused, with heads that several ranks share."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

from torch import nn

from hybridpp.nn.linear import LinearShape
from hybridpp.nn.torch_private import parameters_of
from hybridpp.plan_search.dataflow import LayerDataflow
from hybridpp.plan_search.layer_groups import LayerGroup
from hybridpp.sharding_plan.sharding_spec import DimShard, ShardingSpec

_Pieces: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Widths of the pieces of a layer, and how many ranks share a shard of each."""


def fused_layouts(
    block: nn.Module, layers: Mapping[str, LinearShape], flow: LayerDataflow, group: LayerGroup, tp_size: int
) -> Iterator[ShardingSpec]:
    """How the layers of a group may be divided, the likeliest first: plain, fused, or with heads that ranks share."""
    for pieces in _piece_layouts(group, layers, tp_size):
        spec = ShardingSpec()
        for name in group.columns:
            layer = layers[name]
            widths, copies = pieces[layer.num_outputs]
            params = {f"{name}.weight": DimShard(layer.output_dim, widths, copies)}
            if _has_bias(block, name):
                params[f"{name}.bias"] = DimShard(0, widths, copies)
            spec |= ShardingSpec(params=params, copy_inputs=frozenset({name}))
        for name in group.rows:
            layer = layers[name]
            params = {f"{name}.weight": DimShard(layer.input_dim, (layer.num_inputs,))}
            spec |= ShardingSpec(params=params, reduce_outputs=frozenset({name}))
        if all(shard.divides(tp_size) for shard in spec.params.values()):
            yield _with_copied_outputs(flow, group, spec)


def _has_bias(block: nn.Module, name: str) -> bool:
    return parameters_of(block.get_submodule(name)).get("bias") is not None


def _with_copied_outputs(flow: LayerDataflow, group: LayerGroup, spec: ShardingSpec) -> ShardingSpec:
    """The same; where rows also read replicated layers, gradients are summed at the outputs of those."""
    mixed = {name for row in group.rows for name in flow.layers_read_by(row)} - group.layers
    inside = {name for name in group.columns if flow.layers_read_by(name) & mixed}
    return replace(spec, copy_inputs=spec.copy_inputs - inside, copy_outputs=frozenset(mixed))


def _piece_layouts(group: LayerGroup, layers: Mapping[str, LinearShape], tp_size: int) -> Iterator[dict[int, _Pieces]]:
    """Pieces of layers, by their number of outputs; layers with equal numbers are divided alike.

    Queries, keys and values in one layer with fewer keys and values, which several ranks may share, exist for Falcon.
    """
    width = max(layers[name].num_inputs for name in group.rows)
    kinds = sorted({layers[name].num_outputs for name in group.columns})
    plain: dict[int, _Pieces] = {outputs: ((outputs,), ()) for outputs in kinds}
    largest = kinds[-1]
    fused = [(largest // number,) * number for number in (2, 3, 4, 5, 6) if largest % number == 0]
    likely = [widths for widths in fused if widths[0] == width]
    rest = (largest - width) // 2
    three = 2 * rest == largest - width > 0
    if three:
        likely += [(width, rest, rest), (rest, rest, width)]
    order = [*likely, (largest,)] if largest > width else [(largest,), *likely]
    for widths in dict.fromkeys([*order, *fused]):
        yield plain | {largest: (widths, ())}
    # Fewer heads of keys and values than ranks: several ranks hold the same.
    for copies in (number for number in range(2, tp_size + 1) if tp_size % number == 0):
        if three:
            yield plain | {largest: ((width, rest, rest), (1, copies, copies))}
        # All layers smaller than the queries, or one alone: beside keys and values there may be a gate per head.
        for shared in dict.fromkeys([tuple(kinds[:-1]), *((outputs,) for outputs in kinds[:-1])]):
            if shared:
                yield plain | {outputs: ((outputs,), (copies,)) for outputs in shared}
