"""Which layers of a block may be divided together: some make an activation by its parts, others sum over it."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from hybridpp.tensor_parallel.inference.flow import Flow
from hybridpp.tensor_parallel.linear import Layer


class Group(NamedTuple):
    """Layers that are divided together or not at all.

    Attributes:
        columns: divided by their outputs, in the order in which they run.
        rows: divided by their inputs: they read nothing but what the columns and layers that stay whole make.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]

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


def groups_of(flow: Flow, layers: dict[str, Layer]) -> tuple[list[Group], dict[str, str]]:
    """The groups that a block may have, the likeliest first of those that share layers; and why other layers have none.

    Nothing here is certain: a residual connection looks like any other way from one layer to the next. Whether a group
    can be divided is seen by number.
    """
    groups: list[Group] = []
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


def _closures(flow: Flow, row: str) -> Iterator[Group]:
    """Groups around one row: with everything it reads, then with less."""
    reads = flow.layers_read_by(row)
    # Of a chain only its last layers are columns; those before them stay whole, or are the rows of other groups.
    last = {name for name in reads if not flow.readers(name) & reads and name not in flow.result}
    tries = [last, {name for name in last if flow.readers(name) == {row}}]
    tries.append({name for name in reads if flow.readers(name) == {row} and name not in flow.result})
    tries += [last - {name} for name in last if 1 < len(last) < 6]
    for columns in tries:
        group = _closed(flow, row, columns)
        if group is not None:
            yield group


def _closed(flow: Flow, row: str, columns: set[str]) -> Group | None:
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
            return Group(tuple(sorted(columns, key=order.index)), tuple(sorted(rows, key=order.index)))
        rows |= readers
        columns = columns | more
    return None
