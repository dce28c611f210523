"""The styles that a group's layers may have, by their shapes: plain, fused, with heads that several ranks share."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

from torch import nn

from hybridpp.tensor_parallel.division import Division, Part
from hybridpp.tensor_parallel.inference.flow import Flow
from hybridpp.tensor_parallel.inference.groups import Group
from hybridpp.tensor_parallel.linear import Layer

_Pieces: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""The widths of what is fused in a layer, and how many ranks share a part of each."""


def layouts_of(
    block: nn.Module, layers: Mapping[str, Layer], flow: Flow, group: Group, tp_size: int
) -> Iterator[tuple[dict[str, str], Division]]:
    """Styles for the layers of a group and what they come to, the likeliest first."""
    for pieces in _pieces(group, layers, tp_size):
        styles: dict[str, str] = {}
        division = Division()
        for name in group.columns:
            layer = layers[name]
            widths, copies = pieces[layer.num_outputs]
            parts = {f"{name}.weight": Part(layer.output_dim, widths, copies)}
            if _has_bias(block, name):
                parts[f"{name}.bias"] = Part(0, widths, copies)
            division |= Division(parts=parts, enters=frozenset({name}))
            styles[name] = _column(widths, copies, tp_size)
        for name in group.rows:
            layer = layers[name]
            division |= Division(
                parts={f"{name}.weight": Part(layer.input_dim, (layer.num_inputs,))},
                sums=frozenset({name}),
                first_only=frozenset({f"{name}.bias"}) if _has_bias(block, name) else frozenset(),
            )
            styles[name] = "row"
        if all(part.divides(tp_size) for part in division.parts.values()):
            yield styles, _spread(flow, group, division)


def _has_bias(block: nn.Module, name: str) -> bool:
    return block.get_submodule(name)._parameters.get("bias") is not None


def _spread(flow: Flow, group: Group, division: Division) -> Division:
    """The same, where the rows also read layers that stay whole: their gradients are summed where they come out."""
    mixed = {name for row in group.rows for name in flow.layers_read_by(row)} - group.layers
    inside = {name for name in group.columns if flow.layers_read_by(name) & mixed}
    return replace(division, enters=division.enters - inside, spreads=frozenset(mixed))


def _pieces(group: Group, layers: Mapping[str, Layer], tp_size: int) -> Iterator[dict[int, _Pieces]]:
    """Of each number of outputs the widths of what is fused in it; layers with equal numbers are alike."""
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
    # Fewer heads of keys and values than ranks: several ranks have the same.
    for copies in (number for number in range(2, tp_size + 1) if tp_size % number == 0):
        if three:
            yield plain | {largest: ((width, rest, rest), (1, copies, copies))}
        # All that are smaller than the queries, or one alone: there may be a gate per head beside keys and values.
        for shared in dict.fromkeys([tuple(kinds[:-1]), *((outputs,) for outputs in kinds[:-1])]):
            if shared:
                yield plain | {outputs: ((outputs,), (copies,)) for outputs in shared}


def _column(widths: tuple[int, ...], copies: tuple[int, ...], tp_size: int) -> str:
    """The style of a layer; of one part of a fused one, ``x`` stands before the number of ranks that share it."""
    if len(widths) == 1:
        return f"column:{tp_size // copies[0]}" if copies else "column"
    if copies:
        shared = (
            f"{width}x{number}" if number > 1 else f"{width}" for width, number in zip(widths, copies, strict=True)
        )
        return f"fused_column:concatenated:{','.join(shared)}"
    equal = len(set(widths)) == 1
    return f"fused_column:concatenated:{len(widths) if equal else ','.join(map(str, widths))}"
