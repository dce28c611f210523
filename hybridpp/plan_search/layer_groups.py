"""Groups of layers that may be sharded together: columns compute shards of an activation, rows sum over it."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from hybridpp.nn.linear import LinearShape
from hybridpp.plan_search.dataflow import LayerDataflow
from hybridpp.sharding_plan.plan import ShardKind


class LayerGroup(NamedTuple):
    """Layers that are sharded together or not at all.

    Attributes:
        columns: divided by their outputs, in the order of their calls.
        rows: divided by their inputs; they read only the columns and replicated layers.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]

    def kind_of(self, name: str) -> ShardKind:
        """How one of its layers is divided."""
        return ShardKind.ROW if name in self.rows else ShardKind.COLUMN

    @property
    def layers(self) -> frozenset[str]:
        """All of them."""
        return frozenset((*self.columns, *self.rows))


def common_module(names: Iterable[str]) -> str:
    """The name of the smallest module that holds all of these; empty for the block itself."""
    paths = [name.split(".")[:-1] for name in names]
    shared = 0
    while all(len(path) > shared and path[shared] == paths[0][shared] for path in paths):
        shared += 1
    return ".".join(paths[0][:shared])


def groups_of(flow: LayerDataflow, layers: dict[str, LinearShape]) -> tuple[list[LayerGroup], dict[str, str]]:
    """The possible groups of a block, the likeliest first; and why other layers are in none.

    Nothing here is certain: a residual connection looks like any other path between layers. A trial decides.
    """
    groups: list[LayerGroup] = []
    reasons: dict[str, str] = {}
    for row in flow.reads:
        for group in _closures(flow, row):
            if group not in groups:
                groups.append(group)
    grouped = {name for group in groups for name in group.layers}
    for name in layers:
        if name not in flow.reads:
            reasons[name] = "does not run"
        elif name not in grouped:
            reasons[name] = "its output leaves the block" if name in flow.result else "no layer sums over its output"
    return groups, reasons


def _closures(flow: LayerDataflow, row: str) -> Iterator[LayerGroup]:
    """Groups around one row layer: with all layers that it reads, then with fewer."""
    reads = flow.layers_read_by(row)
    # Of a chain only the last layers are columns; those before them stay replicated or are rows of other groups.
    last = {name for name in reads if not flow.readers(name) & reads and name not in flow.result}
    choices = [last, {name for name in last if flow.readers(name) == {row}}]
    choices.append({name for name in reads if flow.readers(name) == {row} and name not in flow.result})
    choices += [last - {name} for name in last if 1 < len(last) < 6]
    for columns in choices:
        group = _closed(flow, row, columns)
        if group is not None:
            yield group


def _closed(flow: LayerDataflow, row: str, columns: set[str]) -> LayerGroup | None:
    rows = {row}
    while columns:
        readers = {reader for column in columns for reader in flow.readers(column)}
        if readers & columns or any(column in flow.result for column in columns):
            return None
        more = {
            name
            for reader in readers - rows
            for name in flow.layers_read_by(reader)
            if not flow.readers(name) & flow.layers_read_by(reader) and name not in flow.result
        }
        if readers <= rows:
            order = list(flow.reads)
            return LayerGroup(tuple(sorted(columns, key=order.index)), tuple(sorted(rows, key=order.index)))
        rows |= readers
        columns = columns | more
    return None
